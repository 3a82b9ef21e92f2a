"""Heartbeat: how far the steps are and what the executor does, for whoever watches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

#: What an executor does: it waits for a plan ("idle" without a step in hand, else "next plan"),
#: launches a step, waits for the device, for page copies ("copy"), or reads a result ("collect").
OperationName = Literal[
    "idle", "next plan", "launch", "wait", "copy", "collect", "compile", "capture"
]
#: These may take minutes without any sign of progress.
LENGTHY: Final[tuple[OperationName, ...]] = ("compile", "capture")


class Operation(NamedTuple):
    """What the executor does, since when, and for which step; -1 for none."""

    name: OperationName
    since: float
    step: int = -1


class StepInFlight(NamedTuple):
    """A step that the executor has, and when it was submitted."""

    step: int
    since: float


class Peer(Protocol):
    """The process of another rank."""

    @property
    def rank(self) -> int: ...
    def operation(self) -> Operation:
        """What it does now."""

    def print_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr."""


class Heartbeat:
    """Written by the executor (``operation``) and by the engine, readable from any thread.

    An attribute has one writer, which only ever assigns a new tuple or number. Times are seconds
    of ``time.monotonic``.

    Attributes:
        in_flight: the steps that it has, the oldest first.
        num_done: steps whose results the engine has taken.
        done_at: when it took the last one; None before the first.
        peers: of the executor; steps need them, too.
    """

    __slots__ = ("_clock", "_operation", "done_at", "in_flight", "num_done", "peers")

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._operation = Operation("idle", clock())
        self.in_flight: tuple[StepInFlight, ...] = ()
        self.num_done = 0
        self.done_at: float | None = None
        self.peers: Sequence[Peer] = ()

    @property
    def operation(self) -> Operation:
        """What the executor does now."""
        return self._operation

    def enter(self, name: OperationName, step: int = -1) -> None:
        """The executor begins to do something else."""
        self._operation = Operation(name, self._clock(), step)

    def submitted(self, step: int) -> None:
        """The engine gives the executor a step."""
        self.in_flight = (*self.in_flight, StepInFlight(step, self._clock()))

    def finished(self) -> None:
        """The engine takes the result of the oldest step."""
        self.in_flight = self.in_flight[1:]
        self.num_done += 1
        self.done_at = self._clock()
