"""Arrays: what keywords say about them, and their grammar."""

from __future__ import annotations

from itertools import product
from typing import Protocol

import msgspec

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.atoms import (
    Branch,
    Claim,
    Claims,
    Contains,
    Count,
    Item,
    Rest,
    Unevaluated,
    Unique,
)
from asyncllm.text.grammar.schema.logic import Logic
from asyncllm.text.grammar.schema.rules import Rule, Rules, Sequence, Symbol, Terminal, Times
from asyncllm.text.grammar.schema.strings import StringShape

#: States (positions times counter values) in the grammar of one array.
_MAX_STATES = 256
#: Different values that an array of unique items may have.
_MAX_UNIQUE = 9


class Writer(Protocol):
    """The parts of the schema writer that arrays and objects use."""

    rules: Rules
    logic: Logic
    comma: Terminal
    colon: Terminal

    def value(self, claims: Claims) -> Rule: ...
    def few_values(self, claims: Claims, most: int) -> list[Terminal] | None: ...
    def matches(self, regex: Regex, text: str) -> bool: ...
    def names(self, claims: Claims, base: StringShape) -> list[Terminal]: ...


class ArrayShape(msgspec.Struct):
    """The arrays of which all atoms hold.

    Attributes:
        items: claims about the item at an index.
        rests: claims about all items from an index on, as (index, claim).
        contains: counted items.
        least, most: number of items.
        unique: the path of "uniqueItems", None without it.
    """

    items: dict[int, list[Claim]] = {}
    rests: list[tuple[int, Claim]] = []
    contains: list[Contains] = []
    least: int = 0
    most: int | None = None
    unique: str | None = None
    path: str = "#"

    @property
    def first_alike(self) -> int:
        """The index from which on all items are alike."""
        starts = [start for start, _ in self.rests] + [counted.start for counted in self.contains]
        return max([0, *starts, *(index + 1 for index in self.items)])

    def claims_at(self, index: int) -> Claims:
        return (
            *self.items.get(index, ()),
            *(claim for start, claim in self.rests if start <= index),
        )


def fold(logic: Logic, branch: Branch) -> ArrayShape | None:
    """The arrays of which all atoms hold; None if there are clearly none."""
    shape = ArrayShape()
    for watched in branch:
        match watched.atom:
            case Item(index, claim):
                shape.items.setdefault(index, []).append(claim)
            case Rest(start, claim):
                shape.rests.append((start, claim))
            case Contains() as counted:
                shape.contains.append(counted)
                shape.path = counted.claim.node.path
            case Count(least, most):
                shape.least = max(shape.least, least)
                if most is not None:
                    shape.most = most if shape.most is None else min(shape.most, most)
            case Unique(path):
                shape.unique = path
            case Unevaluated(watcher, claim):
                _add_unevaluated(logic, shape, branch, watcher, claim)
    # An item for which no value is valid ends the array before it.
    for start, claim in shape.rests:
        if claim.node.schema is (not claim.holds):
            shape.most = start if shape.most is None else min(shape.most, start)
    if shape.most is not None:
        if shape.least > shape.most:
            return None
        most = shape.most
        shape.items = {index: found for index, found in shape.items.items() if index < most}
    return shape


def _add_unevaluated(
    logic: Logic, shape: ArrayShape, branch: Branch, watcher: int, claim: Claim
) -> None:
    start = 0
    also: list[Claim] = []
    for watched in branch:
        if watcher not in watched.watchers:
            continue
        match watched.atom:
            case Item(index, _):
                start = max(start, index + 1)
            case Rest() | Unevaluated():
                return
            case Contains(_, inner, _, _):
                also.append(inner)
    if also:
        # An item that matches "contains" counts as evaluated.
        either = [*also, claim]
        if any(one.node.base != claim.node.base for one in either):
            raise refused(claim.node.path, "unevaluatedItems", "beside 'contains' spans resources")
        claim = logic.made(claim, {"anyOf": [one.node.schema for one in either]})
    shape.rests.append((start, claim))


def write(writer: Writer, shape: ArrayShape) -> list[Sequence]:
    """The items of an array with commas between, without the brackets."""
    if shape.unique is not None and (shape.most is None or shape.most > 1):
        return _write_unique(writer, shape)
    if shape.contains:
        return [(_write_counted(writer, shape),)]
    alike = shape.first_alike
    if shape.most is not None:
        alike = min(alike, shape.most)
    if alike - shape.least > _MAX_STATES:
        raise refused(shape.path, "prefixItems", "has too many items")
    comma = writer.comma
    tail: Rule | None = None  # what may follow the item before
    if shape.most is None or shape.most > alike:
        item = writer.value(shape.claims_at(alike))
        more = None if shape.most is None else shape.most - alike
        least = max(0, shape.least - alike)
        tail = writer.rules.rule([(Times((comma, item), least, more),)])
        if alike == 0:
            rest = None if more is None else more - 1
            all_alike: Sequence = (item, Times((comma, item), max(0, least - 1), rest))
            return [all_alike] if shape.least > 0 else [(), all_alike]
    certain = min(alike, shape.least)
    for index in reversed(range(certain, alike)):
        item = writer.value(shape.claims_at(index))
        separated: Sequence = (item,) if index == 0 else (comma, item)
        full = (*separated, tail) if tail is not None else separated
        tail = writer.rules.rule([full, ()])
    symbols: list[Symbol] = []
    for index in range(certain):
        symbols += [comma] if index else []
        symbols.append(writer.value(shape.claims_at(index)))
    return [(*symbols, *((tail,) if tail is not None else ()))]


def _write_counted(writer: Writer, shape: ArrayShape) -> Rule:
    """One rule per number of items so far and per value of each counter."""
    last = max(1, shape.first_alike, shape.least, shape.most or 0)
    tops = [
        max(counted.least, 0 if counted.most is None else counted.most + 1)
        for counted in shape.contains
    ]
    states = last + 1
    for top in tops:
        states *= top + 1
    if states > _MAX_STATES or len(tops) > 4:
        raise refused(shape.path, "contains", "with these numbers of items is too complex")
    rules: dict[tuple[int, ...], Rule] = {}
    first = (0, *(0 for _ in tops))
    rules[first] = writer.rules.new_rule()
    todo = [first]
    while todo:
        state = todo.pop()
        writer.logic.budget.spend()
        index, counts = state[0], state[1:]
        rule = rules[state]
        met = all(seen >= one.least for seen, one in zip(counts, shape.contains, strict=True))
        if met and index >= shape.least:
            writer.rules.add(rule)
        if shape.most is not None and index >= shape.most:
            continue
        for claims, following in _steps(shape, index, counts, tops):
            reached = (min(index + 1, last), *following)
            if reached not in rules:
                rules[reached] = writer.rules.new_rule()
                todo.append(reached)
            separator: Sequence = (writer.comma,) if index else ()
            writer.rules.add(rule, *separator, writer.value(claims), rules[reached])
    return rules[first]


def _steps(
    shape: ArrayShape, index: int, counts: tuple[int, ...], tops: list[int]
) -> list[tuple[Claims, tuple[int, ...]]]:
    """The claims of each kind of next item, with the counters after it."""
    base = shape.claims_at(index)
    steps = []
    for chosen in product((True, False), repeat=len(counts)):
        claims = list(base)
        following = []
        possible = True
        for counted, seen, top, hit in zip(shape.contains, counts, tops, chosen, strict=True):
            inside = index >= counted.start
            settled = counted.most is None and seen >= counted.least
            if hit and (not inside or settled):
                possible = False
            elif hit:
                claims.append(counted.claim)
                if counted.most is not None and seen >= counted.most:
                    possible = False
            elif inside and not settled and counted.most is not None:
                claim = counted.claim
                claims.append(Claim(claim.node, not claim.holds, claim.scope))
            following.append(min(seen + hit, top))
        if possible:
            steps.append((tuple(claims), tuple(following)))
    return steps


def _write_unique(writer: Writer, shape: ArrayShape) -> list[Sequence]:
    """Arrays of different items out of a few values: one rule per set of items so far."""
    assert shape.unique is not None
    values = writer.few_values(shape.claims_at(0), _MAX_UNIQUE)
    if values is None or shape.first_alike > 0 or shape.contains:
        raise refused(
            shape.unique,
            "uniqueItems",
            f"is only supported where 'items' is one 'enum' of at most {_MAX_UNIQUE} values",
        )
    most = len(values) if shape.most is None else min(shape.most, len(values))
    rules = {0: writer.rules.new_rule()}
    todo = [0]
    while todo:
        used = todo.pop()
        writer.logic.budget.spend()
        size = used.bit_count()
        if size >= shape.least:
            writer.rules.add(rules[used])
        for at, value in enumerate(values):
            following = used | 1 << at
            if following == used or size >= most:
                continue
            if following not in rules:
                rules[following] = writer.rules.new_rule()
                todo.append(following)
            separator: Sequence = (writer.comma,) if size else ()
            writer.rules.add(rules[used], *separator, value, rules[following])
    return [(rules[0],)]
