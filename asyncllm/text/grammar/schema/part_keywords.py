"""Readers of the keywords about arrays and objects; all readers, by JSON type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.atoms import (
    FALSE,
    TRUE,
    Claim,
    Contains,
    Count,
    Item,
    Kind,
    Matching,
    Names,
    Option,
    Others,
    Presence,
    Property,
    Rest,
    Some,
    Unique,
)
from asyncllm.text.grammar.schema.keywords import (
    OF_ANY_VALUE,
    OF_NUMBERS,
    OF_STRINGS,
    read_count,
    schemas,
    whole,
    whole_number,
)
from asyncllm.text.grammar.schema.logic import Logic, Reader
from asyncllm.text.grammar.schema.strings import read_pattern


def _items_in_places(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if value == []:
        return whole(claim)
    children = logic.children(claim, keyword, schemas(claim, keyword, value), holds=claim.holds)
    items = [Item(index, child.unwatched()) for index, child in enumerate(children)]
    if claim.holds:
        return [Option(tuple(items))]
    path = claim.node.path
    return [Option((item, Count(item.index + 1, None, keyword, path))) for item in items]


def _items(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if isinstance(value, list):  # up to draft 2019-09
        return _items_in_places(logic, claim, keyword, value)
    return _all_from(logic, claim, keyword, len(claim.node.schema.get("prefixItems", ())))


def _additional_items(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    prefix = claim.node.schema.get("items")
    if not isinstance(prefix, list):
        return whole(claim)
    return _all_from(logic, claim, keyword, len(prefix))


def _all_from(logic: Logic, claim: Claim, keyword: str, start: int) -> list[Option]:
    child = logic.part(claim, keyword)
    if claim.holds:
        return [Option((Rest(start, child),))]
    return [Option((Contains(start, child, 1, None),))]


def _contains(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    schema = claim.node.schema
    least, most = 1, None
    if "minContains" in schema:
        least = whole_number(claim, "minContains", schema["minContains"])
    if "maxContains" in schema:
        most = whole_number(claim, "maxContains", schema["maxContains"])
    child = logic.child(claim, keyword).unwatched()
    if claim.holds:
        if most is not None and least > most:
            return FALSE
        if least == 0 and most is None and not claim.watchers:
            return TRUE
        return [Option((Contains(0, child, least, most),))]
    fewer = [Option((Contains(0, child, 0, least - 1),))] if least else []
    more = [] if most is None else [Option((Contains(0, child, most + 1, None),))]
    return fewer + more


def _unique_items(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if not isinstance(value, bool):
        raise claim.refused(keyword, "must be a boolean")
    if not value:
        return whole(claim)
    if not claim.holds:
        raise claim.refused(keyword, "is not supported under a negation")
    return [Option((Unique(claim.node.path),))]


def _named_schemas(claim: Claim, keyword: str) -> dict[str, Any]:
    value = claim.node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise claim.refused(keyword, "must be an object of schemas")
    return value


def _properties(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    names = _named_schemas(claim, keyword)
    found = [Property(name, logic.part(claim, keyword, name)) for name in names]
    if claim.holds:
        return [Option(tuple(found))]
    return [Option((Presence(one.name, True), one)) for one in found]


def _language(claim: Claim, pattern: str) -> Regex:
    found = read_pattern(claim, "patternProperties", pattern)
    if len(found) > 1:
        raise claim.refused("patternProperties", "with look-ahead is not supported")
    return found[0][0]


def _pattern_properties(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    found = [
        Matching(_language(claim, pattern), logic.part(claim, keyword, pattern))
        for pattern in _named_schemas(claim, keyword)
    ]
    if claim.holds:
        return [Option(tuple(found))]
    return [Option((Some(one, keyword, claim.node.path),)) for one in found]


def _additional_properties(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if value is True and not claim.watchers:
        return whole(claim)
    names = frozenset(_named_schemas(claim, "properties"))
    patterns = _named_schemas(claim, "patternProperties")
    regexes = tuple(_language(claim, pattern) for pattern in patterns)
    others = Others(names, regexes, logic.part(claim, keyword))
    if claim.holds:
        return [Option((others,))]
    return [Option((Some(others, keyword, claim.node.path),))]


def _required(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    names = _strings(claim, keyword, value)
    if claim.holds:
        return [Option(tuple(Presence(name, True) for name in names))]
    return [Option((Presence(name, False),)) for name in names]


def _strings(claim: Claim, keyword: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise claim.refused(keyword, "must be a list of strings")
    return list(dict.fromkeys(value))


def _property_names(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    names = Names(logic.part(claim, keyword))
    if claim.holds:
        return [Option((names,))]
    return [Option((Some(names, keyword, claim.node.path),))]


def _dependencies(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    """dependentRequired and dependentSchemas, and what held both up to draft 7."""
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


def _consequence(claim: Claim, keyword: str, needed: Any) -> Any:
    if isinstance(needed, list) and keyword != "dependentSchemas":
        return {"required": _strings(claim, keyword, needed)}
    if isinstance(needed, dict | bool) and keyword != "dependentRequired":
        if "$id" in str(needed):
            raise claim.refused(keyword, "with '$id' inside is not supported")
        return needed
    raise claim.refused(keyword, "is malformed")


READERS: Mapping[Kind, Mapping[str, Reader]] = {
    "null": OF_ANY_VALUE,
    "boolean": OF_ANY_VALUE,
    "number": {**OF_ANY_VALUE, **OF_NUMBERS},
    "string": {**OF_ANY_VALUE, **OF_STRINGS},
    "array": {
        **OF_ANY_VALUE,
        "prefixItems": _items_in_places,
        "items": _items,
        "additionalItems": _additional_items,
        "minItems": read_count,
        "maxItems": read_count,
        "contains": _contains,
        "uniqueItems": _unique_items,
    },
    "object": {
        **OF_ANY_VALUE,
        "properties": _properties,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "required": _required,
        "propertyNames": _property_names,
        "minProperties": read_count,
        "maxProperties": read_count,
        "dependentRequired": _dependencies,
        "dependentSchemas": _dependencies,
        "dependencies": _dependencies,
    },
}
