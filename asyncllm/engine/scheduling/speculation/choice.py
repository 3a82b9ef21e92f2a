"""What is drafted in a step, and who decides that."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple, Protocol

from asyncllm.engine.drafts.drafting import Tally
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.wire.messages import UNKNOWN_DRAFT


class Drafted(NamedTuple):
    """A row that verifies a draft.

    Attributes:
        start: what is promised.
        length: tokens that the sequence should have before the draft.
        assumed: the last of these, which were in flight: what they were taken to be.
    """

    seq: Sequence
    start: int
    kind: str
    tokens: Seq[int]
    length: int
    assumed: Seq[int] = ()

    @property
    def row(self) -> tuple[int, int, int]:
        """Its row in ``StepPlan.rows``."""
        return self.seq.slot, self.start, 1 + len(self.tokens)

    @property
    def on_device(self) -> bool:
        """Whether the device drafts, which knows the tokens before."""
        return self.tokens[0] == UNKNOWN_DRAFT

    @property
    def in_place(self) -> bool:
        """Whether the tokens before it are as assumed; once they are all known."""
        tokens, first = self.seq.tokens, self.length - len(self.assumed)
        return len(tokens) == self.length and tokens[first:].tolist() == list(self.assumed)


class Choice(NamedTuple):
    """What ``choose`` decided: sequences that skip the step, drafts, and how many tokens a head
    drafts after the step."""

    held: tuple[Sequence, ...] = ()
    drafts: tuple[Drafted, ...] = ()
    ahead: int = 0


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

    def planned(self, step: int, drafts: tuple[Drafted, ...]) -> None:
        """A step verifies these of the drafts chosen last."""

    def verified(self, draft: Drafted, num_right: int) -> None:
        """So many of the drafted tokens were right."""

    def step_done(self, step: int, shape: StepShape | None, seconds: float, now: float) -> None:
        """A step is done, in so many seconds of the device; its drafts were verified.

        Args:
            shape: None unless it had decode rows alone, and one token of each.
        """
