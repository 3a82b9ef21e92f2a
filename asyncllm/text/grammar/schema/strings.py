"""Strings: conditions on them, and the regular expressions of their JSON form."""

from __future__ import annotations

import copy
import json
import math
from functools import lru_cache
from typing import Any

import msgspec

from asyncllm.text.grammar.limits import check_together, refused
from asyncllm.text.grammar.regex_parse import parse
from asyncllm.text.grammar.regex_tree import (
    ANY,
    Node,
    RegexError,
    Repeat,
    languages,
    least_length,
    spread,
)
from asyncllm.text.grammar.regex_write import quote, write
from asyncllm.text.grammar.schema.atoms import Atom, Claim, Count, In, Match


class StringShape(msgspec.Struct):
    """A set of strings.

    Attributes:
        values: the only ones, None if there are others.
        excluded: strings that are not in the set.
        inside, outside: languages that contain each string, and that do not.
        least, most: number of characters.
    """

    values: list[str] | None = None
    excluded: set[str] = set()
    inside: list[Node] = []
    outside: list[Node] = []
    least: int = 0
    most: int | None = None

    def terms(self) -> list[str]:
        """Regular expressions that the JSON form matches; behind "~", does not match."""
        if len(patterns := [*self.inside, *self.outside]) > 1:
            check_together(map(spread, patterns))
        languages = [json_text(node) for node in self.inside]
        if self.values is not None:
            languages.insert(0, json_texts(self.values))
        elif self.least or self.most is not None or self.outside or self.excluded or not languages:
            languages.insert(0, json_text(Repeat(ANY, self.least, self.most)))
        refused_ones = [json_text(node) for node in self.outside]
        if self.excluded and self.values is None:
            refused_ones.append(json_texts(sorted(self.excluded)))
        return languages + ["~" + text for text in refused_ones]

    def certain(self) -> bool:
        """Whether the set certainly has a string; False when in doubt."""
        if self.outside or self.values is not None or len(self.inside) > 1:
            return False
        if not self.inside:  # more characters than a schema can exclude strings
            return self.most is None or self.most > 0
        length = least_length(self.inside[0])
        fits = self.least <= length and (self.most is None or length <= self.most)
        return fits and not self.excluded


def json_text(node: Node) -> str:
    """The JSON form of a language, quotes included, as a regular expression."""
    return f'"{write(node, json=True)}"'


def json_texts(values: list[str]) -> str:
    """The JSON forms of these strings, as a regular expression."""
    texts = [quote(json.dumps(value, ensure_ascii=False)[1:-1]) for value in values]
    return f'"{texts[0]}"' if len(texts) == 1 else f'"(?:{"|".join(texts)})"'


def fold(atoms: list[Atom], base: StringShape | None = None) -> StringShape | None:
    """The strings in ``base`` of which all atoms hold; None if there are clearly none."""
    shape = StringShape() if base is None else copy.deepcopy(base)
    for atom in atoms:
        match atom:
            case Count(least, most):
                shape.least = max(shape.least, least)
                if most is not None:
                    shape.most = most if shape.most is None else min(shape.most, most)
            case Match(regex, True):
                if regex not in shape.inside:
                    shape.inside.append(regex)
            case Match(regex, False):
                if regex not in shape.outside:
                    shape.outside.append(regex)
            case In(values, True):
                known, allowed = shape.values, set(values)
                shape.values = [v for v in (values if known is None else known) if v in allowed]
            case In(values, False):
                shape.excluded |= set(values)
    if shape.most is not None and shape.least > shape.most:
        return None
    if shape.values is not None:
        longest = math.inf if shape.most is None else shape.most
        shape.values = [
            value
            for value in shape.values
            if value not in shape.excluded
            and shape.least <= len(value) <= longest
            and not any("\ud800" <= char < "\ue000" for char in value)  # cannot be written
        ]
        if not shape.values:
            return None
    return shape


@lru_cache(maxsize=256)
def pattern_languages(pattern: str) -> tuple[tuple[Node, bool], ...]:
    """The texts in which a pattern of JSON Schema is found; see ``regex_tree.languages``.

    Raises:
        RegexError: it is malformed or not supported.
    """
    return tuple(languages(parse(pattern)))


def read_pattern(claim: Claim, keyword: str, pattern: Any) -> tuple[tuple[Node, bool], ...]:
    """The ``pattern_languages`` of a keyword's pattern.

    Raises:
        BadRequest: it is malformed or not supported.
    """
    if not isinstance(pattern, str):
        raise refused(claim.node.path, keyword, "must be a string")
    try:
        return pattern_languages(pattern)
    except RegexError as error:
        shown = pattern if len(pattern) <= 80 else pattern[:77] + "..."
        raise refused(claim.node.path, keyword, f"{shown!r} {error}") from error
