"""Helpers of the readers of keywords."""

from __future__ import annotations

from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import FALSE, TRUE, Claim, Count, Option
from asyncllm.text.grammar.schema.logic import Logic, Reader


def whole(claim: Claim) -> list[Option]:
    """The options of a claim that is true of every value, if it holds."""
    return TRUE if claim.holds else FALSE


def schemas(claim: Claim, keyword: str, value: Any) -> range:
    """The indices of a list of subschemas."""
    if not isinstance(value, list) or not value:
        raise refused(claim.node.path, keyword, "must be a list of schemas, not empty")
    return range(len(value))


def count(keyword: str, *, lower: bool) -> Reader:
    """Reads a bound on the number of characters, items or properties."""

    def read(logic: Logic, claim: Claim, value: Any) -> list[Option]:
        bound = whole_number(claim, keyword, value)
        path = claim.node.path
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
        return [Option((Count(least, most, keyword, path),))]

    return read


def whole_number(claim: Claim, keyword: str, value: Any) -> int:
    """A count; 2.0 is one too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise refused(claim.node.path, keyword, "must be a whole number")
    if not 0 <= value < 2**31:
        raise refused(claim.node.path, keyword, "must be between 0 and 2147483647")
    return int(value)
