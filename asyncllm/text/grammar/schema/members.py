"""The members of an object in order: optional ones, commas between them, their number."""

from __future__ import annotations

import msgspec

from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.arrays import Writer
from asyncllm.text.grammar.schema.rules import Rule, Sequence, Symbol, Times

#: Most properties of an object whose members are counted.
_MAX_COUNTED = 64


class Member(msgspec.Struct, frozen=True):
    """A property that has a name: its key, the colon, its value."""

    symbols: Sequence
    required: bool


class Members(msgspec.Struct, frozen=True):
    """Members with a name, in order, then any others.

    Attributes:
        named: those with a name.
        extra: one of the others, None if there are none.
        needs_witness: whether a witness must come last (``ObjectShape.witness``).
        witness: the witness, None if it is impossible.
        least, most: number of all members.
        path: the place of these numbers in the schema.
    """

    writer: Writer
    named: list[Member]
    extra: Rule | None
    needs_witness: bool
    witness: Rule | None
    least: int
    most: int | None
    path: str

    def write(self) -> list[Sequence]:
        """The options for what is between the braces.

        Raises:
            BadRequest: the number of members cannot be enforced.
        """
        num_required = sum(member.required for member in self.named)
        if self.most is not None or self.least > max(1, num_required):
            return [(self._counted(),)]
        options: list[Sequence] = []
        if self.named:
            first = self._nonempty(self.named)
            more = self._others(started=True, number=self.least)
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
        keyword = "maxProperties" if self.most is not None else "minProperties"
        if self.least > len(self.named) + 1 and self.extra is not None:
            names = f"{self.least - 1} names in 'properties'"
            raise refused(self.path, "minProperties", f"is only supported beside at least {names}")
        if len(self.named) > _MAX_COUNTED:
            raise refused(self.path, keyword, f"is only supported with {_MAX_COUNTED} properties")
        top = min(max(self.least, self.most or 0), len(self.named) + 1)
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
                if self.most is None or number < self.most:
                    separator: Sequence = (self.writer.comma,) if started else ()
                    options.append((*separator, *member.symbols, after))
                if not member.required:
                    options.append((skipped,))
                before[started, number] = rules.rule(options)
            following = before
        return following[False, 0]

    def _others(self, *, started: bool, number: int) -> list[Sequence]:
        """The members that may follow ``number`` members with a name."""
        lacking = max(0, self.least - number)
        room = None if self.most is None else self.most - number
        if lacking > 1 or (room is not None and room < 0):
            return []
        comma = self.writer.comma
        one_less = None if room is None else room - 1
        if self.needs_witness:
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
