"""Drafting: a sequence's drafts, and how good they have been."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from asyncllm.config import HEADS, SpeculativeConfig
from asyncllm.engine.drafts.sources import Draft, make_drafts
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import UNKNOWN_DRAFT

#: What is expected of a sequence's drafts before counts like so many tokens that were tried. Of
#: those that were, the latest count.
PRIOR_WEIGHT, MEMORY = 2.0, 32.0
#: After so many drafts in a row of which nothing was right, a kind that is right less often than
#: this is not asked for a number of tokens, each time twice as many, up to the last.
MOST_WRONG, LEAST_RATE, FIRST_PAUSE, LONGEST_PAUSE = 2, 0.2, 8, 1024


class Proposal(NamedTuple):
    """Tokens that may follow.

    Attributes:
        prior: of its kind of draft.
        evidence: of this sequence's drafts of the kind.
        assumed: what it takes the tokens in flight to be.
    """

    kind: str
    tokens: Seq[int]
    prior: float
    evidence: Evidence
    assumed: Seq[int] = ()

    @property
    def on_device(self) -> bool:
        """Whether the device guesses, which knows all tokens in flight."""
        return self.tokens[0] == UNKNOWN_DRAFT

    def rate(self, prior: float) -> float:
        """How probable it is that a token is right if those before are, given what is expected
        of other sequences."""
        return self.evidence.rate(prior, PRIOR_WEIGHT)


class Evidence:
    """How many drafted tokens were tried, and how many of these were right; the latest count."""

    __slots__ = ("_most", "_right", "_tried")

    def __init__(self, most: float):
        self._most = most
        self._right = self._tried = 0.0

    def saw(self, num_drafted: int, num_right: int) -> None:
        """A draft was verified. What came after a wrong token was not tried."""
        self._right += num_right
        self._tried += num_right + (num_right < num_drafted)
        if self._tried > self._most:
            self.forget(0.5)

    def forget(self, share: float) -> None:
        self._right -= share * self._right
        self._tried -= share * self._tried

    def rate(self, prior: float, weight: float) -> float:
        """The share that is right, where the prior counts as much as ``weight`` tokens."""
        return (self._right + prior * weight) / (self._tried + weight)


@dataclass(slots=True)
class Tally:
    """Drafts of one kind that were verified, their tokens, and how many of these were right."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_right: int = 0

    def add(self, num_drafted: int, num_right: int) -> None:
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_right += num_right


class _Record:
    """How good one kind of draft is for one sequence.

    Args:
        rests: after drafts that were wrong it is not asked for some time.
    """

    def __init__(self, *, rests: bool) -> None:
        self.evidence = Evidence(MEMORY)
        self._rests = rests
        self._pause = FIRST_PAUSE
        self._num_wrong = 0
        self.quiet_until = 0

    def saw(self, num_drafted: int, num_right: int, length: int) -> None:
        """A draft was verified for a sequence of ``length`` tokens."""
        self.evidence.saw(num_drafted, num_right)
        if num_right:
            self._pause, self._num_wrong = FIRST_PAUSE, 0
            return
        self._num_wrong += 1
        is_bad = self.evidence.rate(0.0, 0.0) < LEAST_RATE
        if self._rests and is_bad and self._num_wrong >= MOST_WRONG:
            self.failed(length)

    def failed(self, length: int) -> None:
        self.quiet_until = length + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class Drafting:
    """The drafts of one sequence, the most certain first.

    Args:
        by_chance: chance decides what is right, whatever the tokens before are: for benchmarks.

    Attributes:
        tallies: by kind.
    """

    __slots__ = ("_by_chance", "_drafts", "_held", "_length", "_newest", "_records", "tallies")

    def __init__(self, drafts: Seq[Draft], *, by_chance: bool = False):
        self._by_chance = by_chance
        self._drafts = tuple(drafts)
        # Those of a head are always there; how good they are decides alone.
        self._records = {draft.kind: _Record(rests=draft.kind not in HEADS) for draft in drafts}
        self._held: str | None = None
        self._length = 0
        #: The kind of the draft verified last, and where the output is after its right tokens.
        self._newest = "", 0
        self.tallies = {draft.kind: Tally() for draft in drafts}

    def is_awake(self, tokens: array[int]) -> bool:
        """Whether ``propose`` would look for a draft."""
        return any(record.quiet_until <= len(tokens) for record in self._records.values())

    def propose(self, tokens: array[int], most: int, unknown: int) -> Proposal | None:
        """What may follow the known tokens and ``unknown`` more, which are in flight."""
        self._length = len(tokens)
        held, self._held = self._held, None
        for draft in self._drafts:
            record = self._records[draft.kind]
            if self._length < record.quiet_until:
                continue
            found = draft.propose(tokens, most + unknown)
            assumed: Seq[int] = ()
            if len(found) == 0 or found[0] != UNKNOWN_DRAFT:
                assumed, found = found[:unknown], found[unknown:]
            if self._by_chance:
                assumed = ()
            if found:
                return Proposal(draft.kind, found[:most], draft.prior, record.evidence, assumed)
            if held == draft.kind and not unknown:
                record.failed(self._length)  # the sequence has skipped a step for nothing
        return None

    def hold(self, kind: str) -> None:
        """The sequence skips a step, so that all its tokens are known for such a draft."""
        self._held = kind

    def verified(
        self, kind: str, num_drafted: int, num_right: int, num_output: int, *, counts: bool = True
    ) -> None:
        """Of so many drafted tokens, the first ``num_right`` were right.

        Args:
            num_output: tokens of the output before them.
            counts: whether this tells how good the guess was.
        """
        self.tallies[kind].add(num_drafted, num_right)
        self._newest = kind, num_output + num_right
        if counts:
            self._records[kind].saw(num_drafted, num_right, self._length)

    def used(self, kind: str, num_output: int) -> tuple[int, int]:
        """Drafted tokens of a kind that are in an output of so many tokens, and wrong ones.

        What came after an end, such as a stop string, was right as well, but is not there.
        """
        tally = self.tallies.get(kind)
        if tally is None:
            return 0, 0
        newest, end = self._newest
        beyond = max(0, end - num_output) if newest == kind else 0
        return tally.num_right - beyond, tally.num_drafted - tally.num_right


def drafting_of(
    num_prompt: int,
    params: SamplingParams,
    lookup: SpeculativeConfig | None,
    token_bytes: Callable[[int], bytes],
) -> Drafting | None:
    """For a new sequence; see ``make_drafts``."""
    drafts = make_drafts(num_prompt, params, lookup, token_bytes)
    by_chance = lookup is not None and lookup.synthetic_acceptance is not None
    return Drafting(drafts, by_chance=by_chance) if drafts else None
