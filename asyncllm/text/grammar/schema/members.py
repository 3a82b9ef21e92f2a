"""The grammar of an object's members: optional ones, commas between them, their number.

Properties that the schema names come first, in the schema's order; then all others. The others may
repeat a name, which no context-free grammar can prevent; readers keep the last one. So
"minProperties" counts at most one of them, and one that must exist comes last.
"""

from __future__ import annotations

from itertools import product

import msgspec
from msgspec.structs import replace

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.arrays import Writer
from asyncllm.text.grammar.schema.atoms import Claim, Claims, Matching, Names, Others, Some
from asyncllm.text.grammar.schema.objects import MAX_OPTIONAL, ObjectShape
from asyncllm.text.grammar.schema.rules import Rule, Sequence, Symbol, Times
from asyncllm.text.grammar.schema.strings import StringShape, json_texts

#: Patterns of names in one object: every combination of them is a class of names.
_MAX_LANGUAGES = 5
#: Most properties of an object whose members are counted.
_MAX_COUNTED = 64


class Member(msgspec.Struct, frozen=True):
    """A property that has a name: its key, the colon, its value."""

    symbols: Sequence
    required: bool


class Members(msgspec.Struct, frozen=True):
    """The members of a shape: those with a name, in order, then any others.

    Attributes:
        extra: one of the others, None if there are none.
        witness: the one that the shape's ``witness`` wants last, None if it is impossible.
    """

    writer: Writer
    shape: ObjectShape
    named: list[Member]
    extra: Rule | None
    witness: Rule | None

    def write(self) -> list[Sequence]:
        """The options for what is between the braces.

        Raises:
            BadRequest: the number of members cannot be enforced.
        """
        num_required = sum(member.required for member in self.named)
        if self.shape.most is not None or self.shape.least > max(1, num_required):
            return [(self._counted(),)]
        options: list[Sequence] = []
        if self.named:
            first = self._nonempty(self.named)
            more = self._others(started=True, number=self.shape.least)
            options = [(first, *symbols) for symbols in more]
        if num_required == 0:
            options += self._others(started=False, number=0)
        return options

    def _nonempty(self, members: list[Member]) -> Rule:
        """Members of which there is at least one, the first of them without a comma before it.

        By halves: the library recurses along rules, so chains of rules must be short.
        """
        self.writer.logic.budget.spend()
        if members[0].required or len(members) == 1:
            rest = self._following(members[1:])
            return self.writer.rules.rule([(*members[0].symbols, *rest)])
        half = len(members) // 2
        left, right = members[:half], members[half:]
        options: list[Sequence] = [(self._nonempty(left), *self._following(right))]
        if not any(member.required for member in left):
            options.append((self._nonempty(right),))
        return self.writer.rules.rule(options)

    def _following(self, members: list[Member]) -> Sequence:
        """Members behind another one."""
        symbols: list[Symbol] = []
        for member in members:
            separated = (self.writer.comma, *member.symbols)
            symbols += separated if member.required else (Times(separated, 0, 1),)
        if len(symbols) > 8:
            return (self.writer.rules.rule([tuple(symbols)]),)
        return tuple(symbols)

    def _counted(self) -> Rule:
        """One rule per next member, whether there was one before it, and the count so far."""
        rules = self.writer.rules
        keyword = "maxProperties" if self.shape.most is not None else "minProperties"
        if self.shape.least > len(self.named) + 1 and self.extra is not None:
            names = f"{self.shape.least - 1} names in 'properties'"
            raise refused(
                self.shape.path, "minProperties", f"is only supported beside at least {names}"
            )
        if len(self.named) > _MAX_COUNTED:
            raise refused(
                self.shape.path, keyword, f"is only supported with {_MAX_COUNTED} properties"
            )
        top = min(max(self.shape.least, self.shape.most or 0), len(self.named) + 1)
        following = {
            (started, number): rules.rule(self._others(started=started, number=number))
            for started in (False, True)
            for number in range(top + 1)
        }
        for member in reversed(self.named):
            self.writer.logic.budget.spend(len(following) // 4)
            before = {}
            for (started, number), skipped in following.items():
                after = following[True, min(number + 1, top)]
                options: list[Sequence] = []
                if self.shape.most is None or number < self.shape.most:
                    separator: Sequence = (self.writer.comma,) if started else ()
                    options.append((*separator, *member.symbols, after))
                if not member.required:
                    options.append((skipped,))
                before[started, number] = rules.rule(options)
            following = before
        return following[False, 0]

    def _others(self, *, started: bool, number: int) -> list[Sequence]:
        """The members that may follow ``number`` members with a name."""
        lacking = max(0, self.shape.least - number)
        room = None if self.shape.most is None else self.shape.most - number
        if lacking > 1 or (room is not None and room < 0):
            return []
        comma = self.writer.comma
        one_less = None if room is None else room - 1
        if self.shape.witness is not None:
            if self.witness is None or room == 0:
                return []
            before: Sequence = ()
            if self.extra is not None:
                inner = (comma, self.extra) if started else (self.extra, comma)
                before = (Times(inner, 0, one_less),)
            return [(*before, *((comma,) if started else ()), self.witness)]
        if self.extra is None or room == 0:
            return [()] if lacking == 0 else []
        if started:
            return [(Times((comma, self.extra), lacking, room),)]
        more = (self.extra, Times((comma, self.extra), 0, one_less))
        return [more] if lacking else [(), more]


def write(writer: Writer, shape: ObjectShape) -> list[Sequence]:
    """The members of an object with commas between, without the braces."""
    options: list[Sequence] = []
    for variant in _variants(writer, shape):
        members = _named_members(writer, variant)
        if members is not None:
            options += Members(writer, variant, members, *_extras(writer, variant)).write()
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
