"""Alternatives for one object: bounds how many optional names they leave open at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import Branch, Property
from asyncllm.text.grammar.schema.objects import MAX_OPTIONAL, ObjectShape, fold

#: The innermost alternative in the path of a subschema.
_ALTERNATIVE: Final = re.compile(r"(.*)/(anyOf|oneOf)/\d+(?:/|\Z)")


class _Alternative(NamedTuple):
    """One branch.

    Attributes:
        optional: the number of optional names.
        early: how many of them come before the last required one.
        tags: the values of required names, as JSON, where the schema lists them.
    """

    branch: Branch
    optional: int
    early: int
    tags: dict[str, frozenset[bytes]]


def check_alternatives(
    branches: Iterable[Branch], contradict: Callable[[Branch, Branch], bool]
) -> None:
    """Check the optional names of all alternatives that the library must follow at once.

    It follows every alternative that the text so far allows. If a required member tells two apart,
    only the optional names before that member count.

    Args:
        contradict: whether no object is of both branches; may be False when in doubt.

    Raises:
        BadRequest: there are more than MAX_OPTIONAL.
    """
    found = [_read(branch, shape) for branch in branches if (shape := fold(branch)) is not None]
    if len(found) < 2 or sum(each.optional for each in found) <= MAX_OPTIONAL:
        return
    for one in found:
        at_once = one.optional
        for other in found:
            if other is not one:
                apart = _told_apart(one, other) or contradict(one.branch, other.branch)
                at_once += other.early if apart else other.optional
        if at_once > MAX_OPTIONAL:
            path, keyword = _place(one.branch)
            reason = f"has more than {MAX_OPTIONAL} names that are not required, over alternatives"
            raise refused(path, keyword, reason)


def _read(branch: Branch, shape: ObjectShape) -> _Alternative:
    names = [name for name in shape.all_names() if name not in shape.absent]
    optional = [name not in shape.required for name in names]
    last = max((i for i, free in enumerate(optional) if not free), default=0)
    tags = {
        name: values
        for name in shape.required
        for claim in shape.properties.get(name, ())
        if claim.holds and (values := _listed(claim.node.schema)) is not None
    }
    return _Alternative(branch, sum(optional), sum(optional[:last]), tags)


def _listed(schema: Any) -> frozenset[bytes] | None:
    """The texts that a schema lists, as JSON; None if it lists none."""
    match schema:
        case {"const": str(value)}:
            return frozenset((msgspec.json.encode(value),))
        case {"enum": list(values)} if all(isinstance(value, str) for value in values):
            return frozenset(map(msgspec.json.encode, values))
    return None


def _told_apart(one: _Alternative, other: _Alternative) -> bool:
    common = one.tags.keys() & other.tags.keys()
    return any(one.tags[name].isdisjoint(other.tags[name]) for name in common)


def _place(branch: Branch) -> tuple[str, str]:
    """Where the alternatives are written, and with which keyword."""
    paths = [one.atom.claim.node.path for one in branch if isinstance(one.atom, Property)]
    for path in paths:
        if place := _ALTERNATIVE.match(path):
            return place[1], place[2]
    return paths[0].rsplit("/", 2)[0] if paths else "#", "properties"
