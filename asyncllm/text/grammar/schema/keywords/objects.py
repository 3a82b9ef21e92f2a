"""Readers of the keywords about objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.atoms import (
    Claim,
    Matching,
    Names,
    Option,
    Others,
    Presence,
    Property,
    Some,
)
from asyncllm.text.grammar.schema.keywords.keyword import count, whole
from asyncllm.text.grammar.schema.logic import Logic, Reader
from asyncllm.text.grammar.schema.strings import read_pattern


def _named_schemas(claim: Claim, keyword: str) -> dict[str, Any]:
    value = claim.node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise refused(claim.node.path, keyword, "must be an object of schemas")
    return value


def _properties(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    found = [
        Property(name, logic.child(claim, "properties", name, holds=claim.holds).unwatched())
        for name in _named_schemas(claim, "properties")
    ]
    if claim.holds:
        return [Option(tuple(found))]
    return [Option((Presence(one.name, True), one)) for one in found]


def _language(claim: Claim, pattern: str) -> Regex:
    found = read_pattern(claim, "patternProperties", pattern)
    if len(found) > 1:
        raise refused(claim.node.path, "patternProperties", "with look-ahead is not supported")
    return found[0][0]


def _pattern_properties(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    found = [
        Matching(
            _language(claim, pattern),
            logic.child(claim, "patternProperties", pattern, holds=claim.holds).unwatched(),
        )
        for pattern in _named_schemas(claim, "patternProperties")
    ]
    if claim.holds:
        return [Option(tuple(found))]
    path = claim.node.path
    return [Option((Some(one, "patternProperties", path),)) for one in found]


def _additional_properties(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    if value is True and not claim.watchers:
        return whole(claim)
    patterns = _named_schemas(claim, "patternProperties")
    others = Others(
        frozenset(_named_schemas(claim, "properties")),
        tuple(_language(claim, pattern) for pattern in patterns),
        logic.child(claim, "additionalProperties", holds=claim.holds).unwatched(),
    )
    if claim.holds:
        return [Option((others,))]
    return [Option((Some(others, "additionalProperties", claim.node.path),))]


def _required(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    names = _strings(claim, "required", value)
    if claim.holds:
        return [Option(tuple(Presence(name, True) for name in names))]
    return [Option((Presence(name, False),)) for name in names]


def _strings(claim: Claim, keyword: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(claim.node.path, keyword, "must be a list of strings")
    return list(dict.fromkeys(value))


def _property_names(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    names = Names(logic.child(claim, "propertyNames", holds=claim.holds).unwatched())
    if claim.holds:
        return [Option((names,))]
    return [Option((Some(names, "propertyNames", claim.node.path),))]


def _dependencies(keyword: str) -> Reader:
    """dependentRequired and dependentSchemas, and what held both up to draft 7."""

    def read(logic: Logic, claim: Claim, value: Any) -> list[Option]:
        named = _named_schemas(claim, keyword)
        if not named:
            return whole(claim)

        def implications() -> dict[str, Any]:
            return {
                "allOf": [
                    {"if": {"required": [name]}, "then": _consequence(claim, keyword, needed)}
                    for name, needed in named.items()
                ]
            }

        return [Option(claims=(logic.derived(claim, keyword, implications),))]

    return read


def _consequence(claim: Claim, keyword: str, needed: Any) -> Any:
    if isinstance(needed, list) and keyword != "dependentSchemas":
        return {"required": _strings(claim, keyword, needed)}
    if isinstance(needed, dict | bool) and keyword != "dependentRequired":
        if "$id" in str(needed):
            raise refused(claim.node.path, keyword, "with '$id' inside is not supported")
        return needed
    raise refused(claim.node.path, keyword, "is malformed")


READERS: Mapping[str, Reader] = {
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "required": _required,
    "propertyNames": _property_names,
    "minProperties": count("minProperties", lower=True),
    "maxProperties": count("maxProperties", lower=False),
    "dependentRequired": _dependencies("dependentRequired"),
    "dependentSchemas": _dependencies("dependentSchemas"),
    "dependencies": _dependencies("dependencies"),
}
