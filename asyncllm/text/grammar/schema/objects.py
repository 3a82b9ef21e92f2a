"""Objects: conditions on their properties; ``members`` has their grammar."""

from __future__ import annotations

import msgspec

from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.atoms import (
    Branch,
    Claim,
    Count,
    Matching,
    Names,
    Others,
    Presence,
    Property,
    Some,
    Unevaluated,
)

#: Optional members of one object: the library follows all of them at once, with two items each,
#: and gives up at 2000 items in the middle of the answer.
MAX_OPTIONAL = 900


class ObjectShape(msgspec.Struct):
    """The objects of which all atoms hold.

    Attributes:
        properties: claims about a property's value, by name, in the order of the grammar.
        required, absent: names that must be present, and names that must not.
        matching, others: claims about the values of properties whose names match, or do not.
        names: claims about all names.
        least, most: number of properties.
        some: properties that must exist, whatever their names.
        witness: one of ``some`` that is none of the named properties.
    """

    properties: dict[str, list[Claim]] = {}
    required: dict[str, None] = {}
    absent: set[str] = set()
    matching: list[Matching] = []
    others: list[Others] = []
    names: list[Claim] = []
    least: int = 0
    most: int | None = None
    some: list[Some] = []
    witness: Some | None = None
    path: str = "#"

    def all_names(self) -> list[str]:
        """Every name that any atom mentions."""
        found = dict.fromkeys(self.properties) | self.required
        wheres = [some.where for some in (*self.some, self.witness) if some is not None]
        for where in (*self.others, *wheres):
            if isinstance(where, Others):
                found |= dict.fromkeys(sorted(where.names))
        return [*found, *sorted(self.absent - found.keys())]


def fold(branch: Branch) -> ObjectShape | None:
    """The objects of which all atoms hold; None if there are clearly none."""
    shape = ObjectShape()
    for watched in branch:
        match watched.atom:
            case Property(name, claim):
                shape.properties.setdefault(name, []).append(claim)
            case Presence(name, True):
                shape.required[name] = None
            case Presence(name, False):
                shape.absent.add(name)
            case Matching() as matching:
                shape.matching.append(matching)
            case Others() as others:
                shape.others.append(others)
            case Names(claim):
                shape.names.append(claim)
            case Count(least, most, _, path):
                shape.least = max(shape.least, least)
                shape.path = path
                if most is not None:
                    shape.most = most if shape.most is None else min(shape.most, most)
            case Some() as some:
                shape.some.append(some)
            case Unevaluated(watcher, claim):
                shape.others += _unevaluated(branch, watcher, claim)
    least = max(shape.least, len(shape.required))
    if shape.absent & shape.required.keys() or (shape.most is not None and least > shape.most):
        return None
    return shape


def _unevaluated(branch: Branch, watcher: int, claim: Claim) -> list[Others]:
    names: set[str] = set()
    regexes: list[Regex] = []
    for watched in branch:
        if watcher not in watched.watchers:
            continue
        match watched.atom:
            case Property(name, _):
                names.add(name)
            case Matching(regex, _):
                regexes.append(regex)
            case Others() | Unevaluated():
                return []
    return [Others(frozenset(names), tuple(dict.fromkeys(regexes)), claim)]
