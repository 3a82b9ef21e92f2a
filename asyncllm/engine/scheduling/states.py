"""What the scheduler asks about recurrent states, and the answers for models without them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from asyncllm.engine.scheduling.batch import Ints
from asyncllm.engine.scheduling.sequence import Sequence


class StatePlan(NamedTuple):
    """The parts of a plan that are about states; see ``StepPlan``."""

    copies: bytes = b""
    slots: bytes = b""


class States(Protocol):
    """What the scheduler asks: of models with states, and of others."""

    def enter(self, seq: Sequence, start: int) -> None:
        """``seq`` has a slot in the batch and begins at position ``start``."""

    def limit_chunk(self, seq: Sequence, start: int, q_len: int) -> int:
        """How much of a chunk may be in one step: up to where the state is kept."""

    def end_of_page(self, start: int, q_len: int) -> int:
        """How much of a chunk that does not end its prompt: only so does its state have a place."""

    def expect(self, seq: Sequence, start: int, other: Sequence) -> None:
        """``other`` waits while ``seq`` is at ``start`` in its prompt: where do they part?"""

    def chunk_planned(self, seq: Sequence, start: int, end: int) -> None:
        """A chunk is planned, and the tree has its pages."""

    def allow_multi_step(self, slots: Ints, starts: Ints, decode_steps: int) -> bool:
        """Whether a step may decode several tokens of each row."""

    def decodes_planned(self, slots: Ints, starts: Ints) -> None:
        """Decode rows are planned."""

    def positions(self) -> Ints | None:
        """By slot, the next position at which the state is kept: a row ends or starts there. None:
        there is none."""

    def plan(self, step: int, rows: bytes) -> StatePlan:
        """For the plan of a step with these rows (``StepPlan.rows``)."""

    def step_done(self, step: int, *, good: bool) -> None:
        """A step is done; ``good``: without an error."""

    def leave(self, seq: Sequence, computed: int, *, cold: bool) -> None:
        """``seq``, no row of which is in flight, is about to give up its slot and its pages.

        Args:
            computed: the position at which the device has its state.
            cold: nobody is expected to want it again.
        """


class NoStates:
    """Of models without recurrent layers."""

    def enter(self, seq: Sequence, start: int) -> None:
        pass

    def limit_chunk(self, seq: Sequence, start: int, q_len: int) -> int:
        return q_len

    def end_of_page(self, start: int, q_len: int) -> int:
        return q_len

    def expect(self, seq: Sequence, start: int, other: Sequence) -> None:
        pass

    def chunk_planned(self, seq: Sequence, start: int, end: int) -> None:
        pass

    def allow_multi_step(self, slots: Ints, starts: Ints, decode_steps: int) -> bool:
        return True

    def decodes_planned(self, slots: Ints, starts: Ints) -> None:
        pass

    def positions(self) -> None:
        pass

    def plan(self, step: int, rows: bytes) -> StatePlan:
        return StatePlan()

    def step_done(self, step: int, *, good: bool) -> None:
        pass

    def leave(self, seq: Sequence, computed: int, *, cold: bool) -> None:
        pass
