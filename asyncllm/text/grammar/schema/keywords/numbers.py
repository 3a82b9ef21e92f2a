"""Readers of the keywords about numbers."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema import formats
from asyncllm.text.grammar.schema.atoms import Bound, Claim, Integer, Multiple, Option
from asyncllm.text.grammar.schema.keywords.keyword import whole
from asyncllm.text.grammar.schema.logic import Logic, Reader
from asyncllm.text.grammar.schema.numbers import MAX_MULTIPLE, digits, exact, fits

#: Most digits of a bound or multiple; real schemas have far fewer.
_MAX_DIGITS = 64


def _number(claim: Claim, keyword: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(claim.node.path, keyword, "must be a number")
    decimal = exact(value)
    if max(map(len, digits(decimal))) > _MAX_DIGITS:
        raise refused(claim.node.path, keyword, f"has more than {_MAX_DIGITS} digits")
    return decimal


def _bound(keyword: str, *, lower: bool, exclusive: bool) -> Reader:
    draft_4 = "exclusiveMinimum" if lower else "exclusiveMaximum"

    def read(logic: Logic, claim: Claim, value: Any) -> list[Option]:
        if exclusive and isinstance(value, bool):
            # Draft 4: not a bound, but about "minimum" and "maximum", which look at it.
            return [Option()] if claim.holds else []
        number = _number(claim, keyword, value)
        strictly = exclusive or claim.node.schema.get(draft_4) is True
        if claim.holds:
            return [Option((Bound(number, lower, strictly),))]
        return [Option((Bound(number, not lower, not strictly),))]

    return read


def _multiple_of(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    number = _number(claim, "multipleOf", value)
    if number <= 0 or not fits(number):
        raise refused(claim.node.path, "multipleOf", f"must be of digits up to {MAX_MULTIPLE}")
    if claim.holds:
        return [Option((Multiple(number, claim.node.path),))]
    if number != 1:
        raise refused(claim.node.path, "multipleOf", "is not supported under a negation")
    return [Option((Integer(False),))]


def _format(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    """OpenAPI's formats of integers; formats of other types are not about numbers."""
    if not isinstance(value, str):
        raise refused(claim.node.path, "format", "must be a string")
    if value not in formats.INTEGERS:
        return whole(claim)
    if not claim.holds:
        raise refused(claim.node.path, "format", "is not supported under a negation")
    low, high = formats.INTEGERS[value]
    return [
        Option(
            (
                Integer(True),
                Bound(Decimal(low), lower=True, exclusive=False),
                Bound(Decimal(high), lower=False, exclusive=False),
            )
        )
    ]


READERS: Mapping[str, Reader] = {
    "format": _format,
    "minimum": _bound("minimum", lower=True, exclusive=False),
    "maximum": _bound("maximum", lower=False, exclusive=False),
    "exclusiveMinimum": _bound("exclusiveMinimum", lower=True, exclusive=True),
    "exclusiveMaximum": _bound("exclusiveMaximum", lower=False, exclusive=True),
    "multipleOf": _multiple_of,
}
