"""Backlog: what waits, and why, and how long a newcomer will. Asking changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.departures import Departures
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.admission import Admission
from asyncllm.engine.scheduling.waiting.reason import Reason, Wait


@dataclass(eq=False)
class Backlog:
    """Answers for those who only ask, such as ``Reservations``. Owns nothing."""

    limits: EngineLimits
    cache: KVCacheManager
    forecast: Forecast
    copies: PageCopies
    trials: Trials
    admission: Admission
    batch: RunningBatch
    departures: Departures

    @property
    def num_waiting(self) -> int:
        """Requests that are not running, for any reason."""
        return len(self.admission.waiting) + self.departures.num_preempted

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the requests in the queue have to prefill."""
        return self.admission.waiting.queue.num_tokens

    @property
    def num_free_slots(self) -> int:
        return self.batch.num_free

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        """How many requests a tenant has in the queue, and their tokens."""
        return self.admission.waiting.queue.waiting_for(tenant)

    def expected_wait(self) -> float:
        """Estimated seconds until a request that arrives now has its first step."""
        return self._wait_seconds((self.num_waiting, self.admission.waiting.queue.num_left))

    def least_seconds(self, seq: Sequence) -> float:
        """Estimated seconds until a sequence that arrives now can be finished at best."""
        self.admission.waiting.measure(seq)
        wait = self._wait_seconds(self.admission.waiting.queue.ahead_of(seq))
        return wait + self.forecast.least(seq)

    def _wait_seconds(self, ahead: tuple[int, int]) -> float:
        """Estimated seconds to a newcomer's first step, with (requests, tokens) ``ahead``."""
        # What the last plan noted: a question must not touch what plans depend on.
        if self.admission.waiting.clock.reason == "pages":  # which are scarcer than slots
            return self.forecast.wait(*ahead, 0, len(self.batch.running))
        return self.forecast.wait(*ahead, self.batch.num_free, self.limits.max_num_seqs)

    def why(self, seq: Sequence) -> Wait:
        """Why a waiting sequence has not entered."""
        waiting, admission = self.admission.waiting, self.admission
        if seq in waiting.queue:
            reason: Reason = "trial" if self.trials.active else waiting.clock.reason or "step"
            needs = self.cache.pages_for(self.forecast.length(seq))
            available = max(0, admission.growth.available)
            return Wait(reason, waiting.queue.num_before(seq), needs, available)
        if (page := waiting.sharing.page_of(seq)) is not None:
            return Wait("prefix", page=page.page, prefix_pages=page.depth)
        if seq.id in admission.deadlines.missed:
            return Wait("deadline")
        if self.copies.is_for(seq):
            return Wait("host" if seq.state is SeqState.LOADING else "budget")
        return Wait("preempted")
