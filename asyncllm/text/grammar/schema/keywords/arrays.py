"""Readers of the keywords about arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import (
    FALSE,
    TRUE,
    Claim,
    Contains,
    Count,
    Item,
    Option,
    Rest,
    Unique,
)
from asyncllm.text.grammar.schema.keywords.keyword import count, schemas, whole, whole_number
from asyncllm.text.grammar.schema.logic import Logic, Reader


def _prefix_items(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    return _items_in_places(logic, claim, "prefixItems", value)


def _items_in_places(logic: Logic, claim: Claim, keyword: str, value: Any) -> list[Option]:
    if value == []:
        return whole(claim)
    children = [
        logic.child(claim, keyword, index, holds=claim.holds)
        for index in schemas(claim, keyword, value)
    ]
    items = [Item(index, child.unwatched()) for index, child in enumerate(children)]
    if claim.holds:
        return [Option(tuple(items))]
    path = claim.node.path
    return [Option((item, Count(item.index + 1, None, keyword, path))) for item in items]


def _items(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    if isinstance(value, list):  # up to draft 2019-09
        return _items_in_places(logic, claim, "items", value)
    prefix = claim.node.schema.get("prefixItems", ())
    return _all_from(logic, claim, "items", len(prefix))


def _additional_items(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    prefix = claim.node.schema.get("items")
    if not isinstance(prefix, list):
        return whole(claim)
    return _all_from(logic, claim, "additionalItems", len(prefix))


def _all_from(logic: Logic, claim: Claim, keyword: str, start: int) -> list[Option]:
    child = logic.child(claim, keyword, holds=claim.holds).unwatched()
    if claim.holds:
        return [Option((Rest(start, child),))]
    return [Option((Contains(start, child, 1, None),))]


def _contains(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    schema = claim.node.schema
    least, most = 1, None
    if "minContains" in schema:
        least = whole_number(claim, "minContains", schema["minContains"])
    if "maxContains" in schema:
        most = whole_number(claim, "maxContains", schema["maxContains"])
    child = logic.child(claim, "contains").unwatched()
    if claim.holds:
        if most is not None and least > most:
            return FALSE
        if least == 0 and most is None and not claim.watchers:
            return TRUE
        return [Option((Contains(0, child, least, most),))]
    fewer = [Option((Contains(0, child, 0, least - 1),))] if least else []
    more = [] if most is None else [Option((Contains(0, child, most + 1, None),))]
    return fewer + more


def _unique_items(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    if not isinstance(value, bool):
        raise refused(claim.node.path, "uniqueItems", "must be a boolean")
    if not value:
        return whole(claim)
    if not claim.holds:
        raise refused(claim.node.path, "uniqueItems", "is not supported under a negation")
    return [Option((Unique(claim.node.path),))]


READERS: Mapping[str, Reader] = {
    "prefixItems": _prefix_items,
    "items": _items,
    "additionalItems": _additional_items,
    "minItems": count("minItems", lower=True),
    "maxItems": count("maxItems", lower=False),
    "contains": _contains,
    "uniqueItems": _unique_items,
}
