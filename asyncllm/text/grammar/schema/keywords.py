"""Readers of the keywords about values of any type, numbers and strings."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema import formats
from asyncllm.text.grammar.schema.atoms import (
    FALSE,
    TRUE,
    Bound,
    Claim,
    Count,
    In,
    Integer,
    Match,
    Multiple,
    Option,
    kind_of,
)
from asyncllm.text.grammar.schema.logic import Logic, Reader
from asyncllm.text.grammar.schema.numbers import MAX_MULTIPLE, digits, exact, fits
from asyncllm.text.grammar.schema.strings import pattern_languages, read_pattern

_TYPES = {"null", "boolean", "number", "integer", "string", "array", "object"}
#: With more options of an "anyOf", "unevaluatedProperties" assumes that a value fits only one of
#: them, which makes the grammar narrower.
_MAX_WATCHED_OPTIONS = 4
#: Most digits of a bound or multiple; real schemas have far fewer.
_MAX_DIGITS = 64


def whole(claim: Claim) -> list[Option]:
    """The options of a claim that is true of every value, if it holds."""
    return TRUE if claim.holds else FALSE


def schemas(claim: Claim, keyword: str, value: Any) -> range:
    """The indices of a list of subschemas."""
    if not isinstance(value, list) or not value:
        raise claim.refused(keyword, "must be a list of schemas, not empty")
    return range(len(value))


def whole_number(claim: Claim, keyword: str, value: Any) -> int:
    """A count; 2.0 is one too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise claim.refused(keyword, "must be a whole number")
    if not 0 <= value < 2**31:
        raise claim.refused(keyword, "must be between 0 and 2147483647")
    return int(value)


def read_count(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    """Reads a bound on the number of characters, items or properties."""
    bound = whole_number(claim, keyword, value)
    lower = keyword.startswith("min")
    if lower == claim.holds:
        least, most = (bound, None) if lower else (bound + 1, None)
    elif claim.holds:
        least, most = 0, bound
    elif bound == 0:
        return FALSE
    else:
        least, most = 0, bound - 1
    if least == 0 and most is None:
        return TRUE
    return [Option((Count(least, most, keyword, claim.node.path),))]


def _type(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise claim.refused(keyword, f"must name JSON types: {value!r}"[:200])
    if logic.kind in names:
        return whole(claim)
    if logic.kind == "number" and "integer" in names:
        return [Option((Integer(claim.holds),))]
    return FALSE if claim.holds else TRUE


def _values(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if keyword == "enum" and not isinstance(value, list):
        raise claim.refused(keyword, "must be a list")
    values = value if keyword == "enum" else [value]
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


def _ref(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if keyword == "$ref":
        target = logic.document.resolve(claim.node)
    else:
        target = logic.document.resolve_dynamic(claim.node, claim.scope)
    return [Option(claims=(logic.follow(claim, target, claim.holds),))]


def _all_of(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    children = logic.children(claim, keyword, schemas(claim, keyword, value), holds=claim.holds)
    if claim.holds:
        return [Option(claims=tuple(children))]
    return [Option(claims=(child,)) for child in children]


def _any_of(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    children = logic.children(claim, keyword, schemas(claim, keyword, value), holds=claim.holds)
    if not claim.holds:
        return [Option(claims=tuple(children))]
    sizes = range(1, 2)
    if claim.watchers and len(children) <= _MAX_WATCHED_OPTIONS:
        sizes = range(1, len(children) + 1)
    return [Option(claims=some) for size in sizes for some in combinations(children, size)]


def _one_of(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    indices = schemas(claim, keyword, value)
    children = logic.children(claim, keyword, indices)
    none = logic.children(claim, keyword, indices, holds=False)
    if not claim.holds:
        pairs = [pair for pair in combinations(children, 2) if not logic.disjoint(*pair)]
        return [Option(claims=tuple(none)), *(Option(claims=pair) for pair in pairs)]
    options = []
    for index, child in enumerate(children):
        others = [other for other in indices if other != index]
        excluded = [none[o] for o in others if not logic.disjoint(child, children[o])]
        options.append(Option(claims=(child, *excluded)))
    return options


def _not(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    return [Option(claims=(logic.child(claim, "not", holds=not claim.holds),))]


def _if(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    options: list[Option] = []
    for met, following in ((True, "then"), (False, "else")):
        condition = logic.child(claim, "if", holds=met)
        if following in claim.node.schema:
            outcome = logic.child(claim, following, holds=claim.holds)
            options.append(Option(claims=(condition, outcome)))
        elif claim.holds:
            options.append(Option(claims=(condition,)))
    if claim.holds and not claim.watchers and not claim.node.schema.keys() & {"then", "else"}:
        return TRUE
    return options


def _number(claim: Claim, keyword: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise claim.refused(keyword, "must be a number")
    decimal = exact(value)
    if max(map(len, digits(decimal))) > _MAX_DIGITS:
        raise claim.refused(keyword, f"has more than {_MAX_DIGITS} digits")
    return decimal


def _bound(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    lower, exclusive = keyword.endswith("inimum"), keyword.startswith("exclusive")
    if exclusive and isinstance(value, bool):
        # Draft 4: not a bound, but about "minimum" and "maximum", which look at it.
        return whole(claim)
    number = _number(claim, keyword, value)
    draft_4 = "exclusiveMinimum" if lower else "exclusiveMaximum"
    strictly = exclusive or claim.node.schema.get(draft_4) is True
    if claim.holds:
        return [Option((Bound(number, lower, strictly),))]
    return [Option((Bound(number, not lower, not strictly),))]


def _multiple_of(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    number = _number(claim, keyword, value)
    if number <= 0 or not fits(number):
        raise claim.refused(keyword, f"must be of digits up to {MAX_MULTIPLE}")
    if claim.holds:
        return [Option((Multiple(number, claim.node.path),))]
    if number != 1:
        raise claim.refused(keyword, "is not supported under a negation")
    return [Option((Integer(False),))]


def _format(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    """Of strings, and OpenAPI's of integers; the formats of one type do not limit another."""
    if not isinstance(value, str):
        raise claim.refused(keyword, "must be a string")
    known = formats.INTEGERS if logic.kind == "number" else formats.PATTERNS
    if value not in known:
        if logic.kind == "string" and value not in formats.WITHOUT_MEANING:
            raise claim.refused(keyword, f"{value!r} is not supported")
        return whole(claim)
    if not claim.holds:
        raise claim.refused(keyword, "is not supported under a negation")
    if logic.kind == "string":
        return _matches(claim, pattern_languages(formats.PATTERNS[value]))
    low, high = map(Decimal, formats.INTEGERS[value])
    bounds = Bound(low, lower=True, exclusive=False), Bound(high, lower=False, exclusive=False)
    return [Option((Integer(True), *bounds))]


def _pattern(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    return _matches(claim, read_pattern(claim, keyword, value))


def _matches(claim: Claim, found: tuple[tuple[Regex, bool], ...]) -> list[Option]:
    if claim.holds:
        return [Option(tuple(Match(regex, inside) for regex, inside in found))]
    return [Option((Match(regex, not inside),)) for regex, inside in found]


OF_ANY_VALUE: Mapping[str, Reader] = {
    "type": _type,
    "const": _values,
    "enum": _values,
    "$ref": _ref,
    "$dynamicRef": _ref,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
}
OF_NUMBERS: Mapping[str, Reader] = {
    "format": _format,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "multipleOf": _multiple_of,
}
OF_STRINGS: Mapping[str, Reader] = {
    "minLength": read_count,
    "maxLength": read_count,
    "pattern": _pattern,
    "format": _format,
}
