"""Objects: conditions on their properties, and their grammar.

Properties that the schema names come first, in the schema's order; then all others. The others may
repeat a name, which no context-free grammar can prevent; readers keep the last one. So
"minProperties" counts at most one of them, and one that must exist comes last.
"""

from __future__ import annotations

from itertools import product

import msgspec
from msgspec.structs import replace

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.arrays import Writer
from asyncllm.text.grammar.schema.atoms import (
    Branch,
    Claim,
    Claims,
    Count,
    Matching,
    Names,
    Others,
    Presence,
    Property,
    Some,
    Unevaluated,
)
from asyncllm.text.grammar.schema.members import Member, Members
from asyncllm.text.grammar.schema.rules import Rule, Sequence
from asyncllm.text.grammar.schema.strings import StringShape, json_texts

#: Patterns of names in one object: every combination of them is a class of names.
_MAX_LANGUAGES = 5
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


def write(writer: Writer, shape: ObjectShape) -> list[Sequence]:
    """The members of an object with commas between, without the braces."""
    options: list[Sequence] = []
    for variant in _variants(writer, shape):
        members = _named_members(writer, variant)
        if members is not None:
            extra, witness = _extras(writer, variant)
            found = Members(
                writer=writer,
                named=members,
                extra=extra,
                needs_witness=variant.witness is not None,
                witness=witness,
                least=variant.least,
                most=variant.most,
                path=variant.path,
            )
            options += found.write()
    return options


def _variants(writer: Writer, shape: ObjectShape) -> list[ObjectShape]:
    """The shapes in which each property that must exist is a named one, or the witness."""
    variants = [shape]
    for some in shape.some:
        found: list[ObjectShape] = []
        for variant in variants:
            for name in variant.all_names():
                if name in variant.absent or not _selects(writer, some, name):
                    continue
                properties = dict(variant.properties)
                if not isinstance(some.where, Names):
                    properties[name] = [*properties.get(name, ()), some.where.claim]
                required = variant.required | {name: None}
                found.append(replace(variant, properties=properties, required=required))
            if variant.witness is not None:
                raise refused(some.path, some.keyword, "is negated more than once for one object")
            found.append(replace(variant, witness=some))
        variants = found
        writer.logic.budget.spend(len(variants))
    return variants


def _selects(writer: Writer, some: Some, name: str) -> bool:
    match some.where:
        case Matching(regex, _):
            return writer.matches(regex, name)
        case Others(names, regexes, _):
            return name not in names and not any(writer.matches(one, name) for one in regexes)
        case Names(claim):
            return bool(writer.names((claim,), StringShape(values=[name])))


def _named_members(writer: Writer, shape: ObjectShape) -> list[Member] | None:
    """The members that have a name, in order; None if a required one is impossible."""
    members = []
    for name in shape.all_names():
        required = name in shape.required
        claims = claims_about(writer, shape, name)
        writer.logic.budget.spend()
        possible = not any(claim.node.schema is (not claim.holds) for claim in claims)
        if name in shape.absent or not possible or not _may_be_named(writer, shape, name):
            if required:
                return None
            continue
        key = writer.rules.terminal([json_texts([name])])
        assert key is not None
        members.append(Member((key, writer.colon, writer.value(claims)), required))
    if sum(not member.required for member in members) > MAX_OPTIONAL:
        path = next(iter(shape.properties.values()))[0].node.path.rsplit("/", 2)[0]
        reason = f"has more than {MAX_OPTIONAL} names that are not required"
        raise refused(path, "properties", reason)
    return members


def claims_about(writer: Writer, shape: ObjectShape, name: str) -> Claims:
    """All claims about the value of one property."""
    claims = list(shape.properties.get(name, ()))
    claims += [one.claim for one in shape.matching if writer.matches(one.regex, name)]
    for others in shape.others:
        if not (name in others.names or any(writer.matches(one, name) for one in others.regexes)):
            claims.append(others.claim)
    return tuple(dict.fromkeys(claims))


def _may_be_named(writer: Writer, shape: ObjectShape, name: str) -> bool:
    if any("\ud800" <= char < "\ue000" for char in name):
        return False
    if not shape.names:
        return True
    return bool(writer.names(tuple(shape.names), StringShape(values=[name])))


def _extras(writer: Writer, shape: ObjectShape) -> tuple[Rule | None, Rule | None]:
    """A member that the schema does not name, and the witness."""
    languages = dict.fromkeys(one.regex for one in shape.matching)
    for others in [*shape.others, *([shape.witness.where] if shape.witness else [])]:
        if isinstance(others, Others):
            languages |= dict.fromkeys(others.regexes)
        elif isinstance(others, Matching):
            languages[others.regex] = None
    if len(languages) > _MAX_LANGUAGES:
        raise refused(shape.path, "patternProperties", f"has over {_MAX_LANGUAGES} patterns")
    extras: list[Sequence] = []
    witnesses: list[Sequence] = []
    for chosen in product((True, False), repeat=len(languages)):
        inside = [regex for regex, hit in zip(languages, chosen, strict=True) if hit]
        claims = [one.claim for one in shape.matching if one.regex in inside]
        claims += [one.claim for one in shape.others if not set(one.regexes) & set(inside)]
        if any(claim.node.schema is (not claim.holds) for claim in claims):
            continue
        outside = [regex for regex in languages if regex not in inside]
        base = StringShape(excluded=set(shape.all_names()), inside=inside, outside=outside)
        extras += _members(writer, shape.names, base, claims)
        if shape.witness is not None:
            witnesses += _witnesses(writer, shape, shape.witness, base, claims)
    rules = [writer.rules.rule(found) if found else None for found in (extras, witnesses)]
    return rules[0], rules[1]


def _witnesses(
    writer: Writer, shape: ObjectShape, some: Some, base: StringShape, claims: list[Claim]
) -> list[Sequence]:
    match some.where:
        case Names(claim):
            return _members(writer, [*shape.names, claim], base, claims)
        case Matching(regex, claim) if regex in base.inside:
            return _members(writer, shape.names, base, [*claims, claim])
        case Others(_, regexes, claim) if not set(regexes) & set(base.inside):
            return _members(writer, shape.names, base, [*claims, claim])
    return []


def _members(
    writer: Writer, names: list[Claim], base: StringShape, claims: list[Claim]
) -> list[Sequence]:
    keys = writer.names(tuple(names), base)
    if not keys:
        return []
    value = writer.value(tuple(dict.fromkeys(claims)))
    return [(key, writer.colon, value) for key in keys]
