"""Readers of the keywords about a value of any type."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import FALSE, TRUE, Claim, In, Integer, Option, kind_of
from asyncllm.text.grammar.schema.keywords.keyword import schemas, whole
from asyncllm.text.grammar.schema.logic import Logic, Reader

_TYPES = {"null", "boolean", "number", "integer", "string", "array", "object"}
#: With more options of an "anyOf", "unevaluatedProperties" assumes that a value fits only one of
#: them, which makes the grammar narrower.
_MAX_WATCHED_OPTIONS = 4


def _read_type(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise refused(claim.node.path, "type", f"must name JSON types: {value!r}"[:200])
    if logic.kind in names:
        return whole(claim)
    if logic.kind == "number" and "integer" in names:
        return [Option((Integer(claim.holds),))]
    return FALSE if claim.holds else TRUE


def _read_const(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    return _one_of_values(logic, claim, "const", [value])


def _read_enum(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    if not isinstance(value, list):
        raise refused(claim.node.path, "enum", "must be a list")
    return _one_of_values(logic, claim, "enum", value)


def _one_of_values(logic: Logic, claim: Claim, keyword: str, values: list[Any]) -> list[Option]:
    mine = [(index, value) for index, value in enumerate(values) if kind_of(value) == logic.kind]
    if not mine:
        return FALSE if claim.holds else TRUE
    logic.budget.spend(len(mine) // 16)
    if logic.kind not in ("array", "object"):
        return [Option((In(tuple(value for _, value in mine), claim.holds),))]
    equal = [logic.constant(claim, keyword, index, value) for index, value in mine]
    if claim.holds:
        return [Option(claims=(one,)) for one in equal]
    return [Option(claims=tuple(Claim(one.node, False, one.scope) for one in equal))]


def _read_ref(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    target = logic.document.resolve(claim.node)
    return [Option(claims=(logic.follow(claim, target, claim.holds),))]


def _read_dynamic_ref(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    target = logic.document.resolve_dynamic(claim.node, claim.scope)
    return [Option(claims=(logic.follow(claim, target, claim.holds),))]


def _read_all_of(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    children = [
        logic.child(claim, "allOf", index, holds=claim.holds)
        for index in schemas(claim, "allOf", value)
    ]
    if claim.holds:
        return [Option(claims=tuple(children))]
    return [Option(claims=(child,)) for child in children]


def _read_any_of(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    children = [
        logic.child(claim, "anyOf", index, holds=claim.holds)
        for index in schemas(claim, "anyOf", value)
    ]
    if not claim.holds:
        return [Option(claims=tuple(children))]
    sizes = range(1, 2)
    if claim.watchers and len(children) <= _MAX_WATCHED_OPTIONS:
        sizes = range(1, len(children) + 1)
    return [Option(claims=some) for size in sizes for some in combinations(children, size)]


def _read_one_of(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    indices = schemas(claim, "oneOf", value)
    children = [logic.child(claim, "oneOf", index) for index in indices]
    none = [logic.opposite(claim, "oneOf", index) for index in indices]
    if claim.holds:
        return [
            Option(
                claims=(
                    child,
                    *(
                        none[other]
                        for other in indices
                        if other != index and not logic.disjoint(child, children[other])
                    ),
                )
            )
            for index, child in enumerate(children)
        ]
    pairs = [pair for pair in combinations(children, 2) if not logic.disjoint(*pair)]
    return [Option(claims=tuple(none)), *(Option(claims=pair) for pair in pairs)]


def _read_not(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    return [Option(claims=(logic.child(claim, "not", holds=not claim.holds),))]


def _read_if(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    options: list[Option] = []
    for met, keyword in ((True, "then"), (False, "else")):
        condition = logic.child(claim, "if", holds=met)
        if keyword in claim.node.schema:
            outcome = logic.child(claim, keyword, holds=claim.holds)
            options.append(Option(claims=(condition, outcome)))
        elif claim.holds:
            options.append(Option(claims=(condition,)))
    if claim.holds and not claim.watchers and not claim.node.schema.keys() & {"then", "else"}:
        return TRUE
    return options


READERS: Mapping[str, Reader] = {
    "type": _read_type,
    "const": _read_const,
    "enum": _read_enum,
    "$ref": _read_ref,
    "$dynamicRef": _read_dynamic_ref,
    "allOf": _read_all_of,
    "anyOf": _read_any_of,
    "oneOf": _read_one_of,
    "not": _read_not,
    "if": _read_if,
}
