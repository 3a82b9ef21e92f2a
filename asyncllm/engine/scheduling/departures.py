"""Departures: how sequences leave the batch, preempted or ended, and give up what they have."""

from __future__ import annotations

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.states import States
from asyncllm.engine.scheduling.step import Step
from asyncllm.engine.scheduling.waiting.admission import Admission
from asyncllm.engine.scheduling.waiting.queue import OUTPUT_COST


class Departures:
    """Owns who has left the batch while a step in flight still has a row of it.

    Such a sequence keeps its slot and its pages until that step is done.

    Attributes:
        num_preemptions: it only grows.
        num_preempted: of those that have left, how many will wait again.
        last_done: the number of the last step that is done.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        copies: PageCopies,
        admission: Admission,
        batch: RunningBatch,
        states: States,
    ):
        self.num_preemptions = 0
        self.num_preempted = 0
        self.last_done = -1
        self._cache = cache
        self._copies = copies
        self._admission = admission
        self._batch = batch
        self._states = states
        #: By the last step that has a row of them.
        self._leaving: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Steps that somebody waits for."""
        return len(self._leaving)

    def make_room(self, step: Step, now: float) -> bool:
        """Take pages from a sequence; False when some are already on their way back."""
        if self._leaving or self._copies.outstanding:
            return False
        if self._admission.make_room():
            return True
        # The oldest is never preempted, so there is always progress.
        _, *others = sorted(self._batch.running.values(), key=lambda seq: seq.id)
        if not others:
            raise RuntimeError("the KV cache cannot hold one sequence of max_model_len")
        self.preempt(min(others, key=self._loss), step, now)
        return True

    def preempt(self, seq: Sequence, step: Step, now: float) -> None:
        """Send a sequence back to the queue with its tokens; its full pages stay cached."""
        seq.timeline.note(now, step.number, "preempted", len(seq.tokens))
        step.drop_pages(seq.slot)
        self.num_preemptions += 1
        self.num_preempted += 1
        seq.state = SeqState.WAITING
        self._leave(seq)

    def end(self, seq: Sequence, now: float) -> None:
        """A sequence with a slot ends; its computed pages stay cached."""
        if seq.state is SeqState.RUNNING:
            self._pin(seq, now)
            self._leave(seq)
        else:
            self.num_preempted -= 1

    def step_done(self, number: int) -> None:
        """The oldest step in flight is done."""
        self.last_done = number
        for seq in self._leaving.pop(number, ()):
            self._settle(seq)

    def _loss(self, seq: Sequence) -> tuple[int, int, int]:
        """Order of preemption: least urgent first, then least work to repeat, then youngest."""
        _, computed_here, _ = self._batch.work(seq)
        return (-seq.service.priority, computed_here, -seq.id)

    def _pin(self, seq: Sequence, now: float) -> None:
        """Pin the pages of a sequence that ends for as long as it asked."""
        if not (ttl := seq.kv.ttl) or seq.kv.corrupt:
            return
        computed, tenant = self._batch.num_done(seq), seq.service.tenant
        if pages := self._cache.pin(seq.kv, computed, tenant, now + ttl):
            seq.timeline.note(now, self.last_done, "pinned", pages, round(1e3 * ttl))

    def _leave(self, seq: Sequence) -> None:
        """Leave the batch; slot and pages follow when no step in flight has a row of it."""
        self._batch.leave(seq)
        self._admission.growth.leave(seq)
        if not seq.kv.corrupt:
            self._cache.commit(seq.kv, self._batch.num_done(seq))
        last = int(self._batch.last_step[seq.slot])
        if last > self.last_done:
            self._leaving.setdefault(last, []).append(seq)
        else:
            self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """Give up slot, state and pages; who was preempted joins the queue."""
        waits = seq.state is SeqState.WAITING
        cold = seq.kv.ttl == 0 and not waits
        self._states.leave(seq, int(self._batch.computed[seq.slot]), cold=cold)
        computed, new_tokens, generated = self._batch.work(seq)
        self._admission.settle(seq, new_tokens + (OUTPUT_COST - 1) * generated)
        if seq.kv.corrupt:
            self._cache.discard(seq.kv)
        else:
            self._cache.release(seq.kv, computed, cold=cold)
        self._batch.vacate(seq)
        if waits:
            self.num_preempted -= 1
            seq.kv.corrupt, seq.wanted = False, True
            self._admission.waiting.push(seq)
