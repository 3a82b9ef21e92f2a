"""What is drafted in a step, and who decides that."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple, Protocol

from asyncllm.engine.drafts.drafting import Tally
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.timing.prefill_room import StepShape


class Drafted(NamedTuple):
    """A row that verifies a draft: its sequence, its position, and what was drafted."""

    seq: Sequence
    start: int
    kind: str
    tokens: Seq[int]

    @property
    def row(self) -> tuple[int, int, int]:
        """Its row in ``StepPlan.rows``."""
        return self.seq.slot, self.start, 1 + len(self.tokens)


class Choice(NamedTuple):
    """What ``choose`` decided: sequences that skip the step, and drafts."""

    held: tuple[Sequence, ...] = ()
    drafts: tuple[Drafted, ...] = ()


NOTHING: Final = Choice()


class Speculation(Protocol):
    """Decides what is drafted.

    Attributes:
        tallies: by kind of draft, of those that were verified.
    """

    tallies: dict[str, Tally]

    def choose(self, batch: RunningBatch, done: int, num_waiting: int) -> Choice:
        """For the next step.

        Args:
            done: the number of the last step that is done.
            num_waiting: requests that are not running.
        """

    def planned(self, step: int, shape: StepShape, now: float) -> None:
        """A step of this shape verifies the drafts chosen last."""

    def verified(self, draft: Drafted, num_right: int) -> None:
        """So many of the drafted tokens were right."""

    def step_done(self, seconds: float, now: float) -> None:
        """All drafts of a step were verified, in so many seconds of the device."""
