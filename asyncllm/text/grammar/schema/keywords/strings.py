"""Readers of the keywords about strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.regex_tree import Node
from asyncllm.text.grammar.schema import formats
from asyncllm.text.grammar.schema.atoms import FALSE, TRUE, Claim, Match, Option
from asyncllm.text.grammar.schema.keywords.keyword import count
from asyncllm.text.grammar.schema.logic import Logic, Reader
from asyncllm.text.grammar.schema.strings import pattern_languages, read_pattern


def _pattern(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    return _matches(claim, read_pattern(claim, "pattern", value))


def _format(logic: Logic, claim: Claim, value: Any) -> list[Option]:
    if not isinstance(value, str):
        raise refused(claim.node.path, "format", "must be a string")
    if value in formats.WITHOUT_MEANING:
        return TRUE if claim.holds else FALSE
    if value not in formats.PATTERNS:
        raise refused(claim.node.path, "format", f"{value!r} is not supported")
    if not claim.holds:
        raise refused(claim.node.path, "format", "is not supported under a negation")
    return _matches(claim, pattern_languages(formats.PATTERNS[value]))


def _matches(claim: Claim, found: tuple[tuple[Node, bool], ...]) -> list[Option]:
    if claim.holds:
        return [Option(tuple(Match(regex, inside) for regex, inside in found))]
    return [Option((Match(regex, not inside),)) for regex, inside in found]


READERS: Mapping[str, Reader] = {
    "minLength": count("minLength", lower=True),
    "maxLength": count("maxLength", lower=False),
    "pattern": _pattern,
    "format": _format,
}
