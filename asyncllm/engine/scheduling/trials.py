"""Trials: find the request that makes steps fail, by running suspects again in groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from asyncllm.engine.scheduling.sequence import SeqState, Sequence

#: A sequence is given up after more failed steps than this. Finding one cause among n sequences
#: takes about log2(n) failed steps, so this allows for several causes in the life of a request.
MOST_FAILURES: Final = 64


class _Trial(NamedTuple):
    """A suspect, which passes when it is longer than ``until``, where its step failed."""

    seq: Sequence
    until: int

    @property
    def passed(self) -> bool:
        return self.seq.state is SeqState.FINISHED or len(self.seq.tokens) > self.until


class Trials:
    """Groups of suspects, each run alone; a group whose step fails is cut in two.

    A failed step does not say which of its requests is the cause. So all of them become suspects
    and run again in groups: first the newcomers of that step apart from the others, then halves. A
    group has passed when each of its sequences is longer than before, or has ended. A sequence that
    fails in a step of its own is the cause. With n rows and one cause, about log2(n) steps fail,
    and the other sequences are computed again at most twice on average.
    """

    def __init__(self) -> None:
        self._groups: deque[list[_Trial]] = deque()
        self._current: list[_Trial] = []

    @property
    def active(self) -> bool:
        """Whether only the sequences of one group may run."""
        return bool(self._current or self._groups)

    @property
    def group(self) -> Iterable[Sequence]:
        """The sequences on trial that have neither passed nor ended."""
        return (trial.seq for trial in self._current if not trial.passed)

    def suspect(
        self, suspects: list[tuple[Sequence, int]], newcomers: Collection[Sequence]
    ) -> list[Sequence]:
        """A step with these sequences has failed; returns those to be given up.

        Args:
            suspects: with the number of each one's positions computed or in flight.
            newcomers: sequences that this step admitted, the likeliest cause.
        """
        given_up: list[Sequence] = []
        old: list[_Trial] = []
        new: list[_Trial] = []
        for seq, computed in suspects:
            seq.num_failures += 1
            if seq.num_failures > MOST_FAILURES:
                given_up.append(seq)
                continue
            trial = _Trial(seq, max(len(seq.tokens), computed))
            (new if seq in newcomers else old).append(trial)
        failed = {seq.id for seq, _ in suspects}
        rest = [trial for trial in self._current if trial.seq.id not in failed]
        half = len(old or new) // 2
        parts = [old, new] if old and new else [(old or new)[:half], (old or new)[half:]]
        # extendleft reverses: the last of these comes first.
        self._groups.extendleft(part for part in (rest, *parts) if part)
        self._current = []
        return given_up

    def advance(self) -> bool:
        """Whether the next group is on trial from now on: the last one has passed or failed."""
        self._current = [trial for trial in self._current if not trial.passed]
        if self._current:
            return False
        while self._groups and not self._current:
            self._current = [trial for trial in self._groups.popleft() if not trial.passed]
        return bool(self._current)
