"""Vitals: what a thread that watches an engine may read of it while the engine runs."""

from __future__ import annotations

from asyncllm.engine.requests.history import History, RequestTrace, StepRecord
from asyncllm.engine.requests.live import Requests
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.wire.heartbeat import Heartbeat


class Vitals:
    """Read only. Each method copies what it needs in one step, so no lock is needed.

    Attributes:
        heartbeat: of the executor and of the steps.
    """

    def __init__(
        self, heartbeat: Heartbeat, scheduler: Scheduler, requests: Requests, history: History
    ):
        self.heartbeat = heartbeat
        self._scheduler = scheduler
        self._requests = requests
        self._history = history

    def oldest_step(self) -> tuple[int, list[int]] | None:
        """The number of the oldest step in flight, and the ids of its requests."""
        for step in list(self._scheduler.in_flight):
            sequences = {seq.id for seq in step.decodes}
            sequences |= {chunk.seq.id for chunk in step.chunks}
            return step.number, sorted(sequences)
        return None

    def latest_steps(self, most: int) -> list[StepRecord]:
        """The steps submitted last, the newest at the end."""
        return self._history.latest_steps(most)

    def live_requests(self, most: int) -> list[RequestTrace]:
        """Requests that have not ended, the oldest first, without their steps."""
        return self._requests.live_traces(most)
