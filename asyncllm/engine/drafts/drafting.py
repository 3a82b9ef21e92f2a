"""Drafting: a sequence's drafts, and how good they have been."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from asyncllm.config import SpeculativeConfig
from asyncllm.engine.drafts.sources import Draft, make_drafts
from asyncllm.types import SamplingParams

#: What is expected of a sequence's drafts before counts like so many tokens that were tried. Of
#: those that were, the latest count.
PRIOR_WEIGHT, MEMORY = 2.0, 32.0
#: Tokens for which a kind of draft that is mostly wrong is not asked after nothing of it was right;
#: each time twice as many, up to the second.
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024


class Proposal(NamedTuple):
    """Tokens that may follow.

    Attributes:
        prior: of its kind of draft.
        evidence: of this sequence's drafts of the kind.
    """

    kind: str
    tokens: Seq[int]
    prior: float
    evidence: Evidence

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
    """How good one kind of draft is for one sequence."""

    def __init__(self) -> None:
        self.evidence = Evidence(MEMORY)
        self._pause = FIRST_PAUSE
        self.quiet_until = 0

    def saw(self, num_drafted: int, num_right: int, length: int) -> None:
        """A draft was verified for a sequence of ``length`` tokens."""
        self.evidence.saw(num_drafted, num_right)
        if num_right:
            self._pause = FIRST_PAUSE
        elif self.evidence.rate(0.0, 0.0) < 0.5:
            self.failed(length)

    def failed(self, length: int) -> None:
        self.quiet_until = length + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class Drafting:
    """The drafts of one sequence, the most certain first.

    Attributes:
        tallies: by kind.
    """

    __slots__ = ("_drafts", "_held", "_length", "_records", "tallies")

    def __init__(self, drafts: Seq[Draft]):
        self._drafts = tuple(drafts)
        self._records = {draft.kind: _Record() for draft in drafts}
        self._held: str | None = None
        self._length = 0
        self.tallies = {draft.kind: Tally() for draft in drafts}

    def propose(self, tokens: array[int], most: int, unknown: int) -> Proposal | None:
        """What may follow the known tokens and ``unknown`` more, which are in flight."""
        self._length = len(tokens)
        held, self._held = self._held, None
        for draft in self._drafts:
            record = self._records[draft.kind]
            if self._length < record.quiet_until:
                continue
            found = draft.propose(tokens, most + unknown)[unknown:]
            if found:
                return Proposal(draft.kind, found, draft.prior, record.evidence)
            if held == draft.kind and not unknown:
                record.failed(self._length)  # the sequence has skipped a step for nothing
        return None

    def hold(self, kind: str) -> None:
        """The sequence skips a step, so that all its tokens are known for such a draft."""
        self._held = kind

    def verified(self, kind: str, num_drafted: int, num_right: int) -> None:
        """Of so many drafted tokens, the first ``num_right`` were right."""
        self.tallies[kind].add(num_drafted, num_right)
        self._records[kind].saw(num_drafted, num_right, self._length)


def drafting_of(
    num_prompt: int,
    params: SamplingParams,
    lookup: SpeculativeConfig | None,
    token_bytes: Callable[[int], bytes],
) -> Drafting | None:
    """For a new sequence; see ``make_drafts``."""
    drafts = make_drafts(num_prompt, params, lookup, token_bytes)
    return Drafting(drafts) if drafts else None
