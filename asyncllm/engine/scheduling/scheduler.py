"""The scheduler: which rows the next step computes, and what a finished step means.

Iteration-level scheduling (Yu et al., ORCA, OSDI 2022) without phases: a step is a list of rows,
each with the next positions of one sequence; a decode row has one position. Decode rows come first.
Prompt chunks share the rest of the step (Agrawal et al., Sarathi-Serve, OSDI 2024), in the order of
a policy.

Pure: no torch, no I/O, no clock. The same calls in the same order give the same plans.
"""

from __future__ import annotations

from collections import deque
from typing import Self

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.policy import Policy, PolicyGuard
from asyncllm.engine.scheduling.admission import Admission
from asyncllm.engine.scheduling.batch import LeakCheck, RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.decode import DecodePlanner
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.pace import EvenPace, GreedyPace
from asyncllm.engine.scheduling.prefill import PrefillPlanner
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.step import Applied, Emitted, Planned, PromptPart, Step
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.queue import OUTPUT_COST
from asyncllm.types import FinishReason
from asyncllm.wire.messages import BAD_TOKEN, NO_TOKEN, StepResult, unpack


class Scheduler:
    """Owns every sequence's state, slots and, through the cache manager, pages.

    Steps are applied in the order in which they were planned. A sequence that ended or was
    preempted keeps its slot and pages until no step in flight has a row of it.
    """

    def __init__(
        self, limits: EngineLimits, cache: KVCacheManager, policy: Policy, times: StepTimeModel
    ):
        self.limits = limits
        self.policy = policy
        self.cache = cache
        self.times = times
        self.running: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._forecast = Forecast(times)
        self._copies = PageCopies(cache, times)
        self._guard = guard = PolicyGuard(policy)
        self._trials = Trials()
        forecast, copies = self._forecast, self._copies
        self._admission = Admission(limits, cache, guard, forecast, copies, self._trials)
        self._batch = RunningBatch(limits.max_num_seqs, limits.page_size)
        self.leak_check = LeakCheck(cache, self._batch)
        # For those who only ask: of a sequence without a slot, and of one with a slot.
        self.why, self.progress = self._admission.why, self._batch.progress
        evenly = policy.evenly and not limits.itl_target  # a target gives steps their size
        pace = EvenPace(limits, forecast, times) if evenly else GreedyPace()
        parts = copies, self._admission, self._batch
        self._prefill = PrefillPlanner(limits, cache, guard, forecast, times, *parts, pace)
        self._decode = DecodePlanner(limits, cache, forecast, *parts, self._make_room)
        self.in_flight: deque[Step] = deque()
        self._landed = -1
        #: Sequences that left ``running``, by the step after which their slots and pages are free.
        self._settling: dict[int, list[Sequence]] = {}
        self._num_preempted = 0  # of those settling; they will wait again

    @classmethod
    def create(cls, limits: EngineLimits, policy: Policy) -> Self:
        """A scheduler with an empty cache and no step times yet."""
        times = StepTimeModel(limits.page_copy_seconds, limits.step_sizes)
        return cls(limits, KVCacheManager.create(limits), policy, times)

    @property
    def num_waiting(self) -> int:
        """Requests that are not running, for any reason."""
        return self._admission.num_waiting + self._num_preempted

    @property
    def idle(self) -> bool:
        """No sequence has anything, and nothing is under way."""
        busy = self.running or self._settling or self.in_flight or self._copies.outstanding
        return not (busy or self.num_waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the requests in the queue have to prefill."""
        return self._admission.queue.num_tokens

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        """How many requests a tenant has in the queue, and their tokens."""
        return self._admission.queue.waiting_for(tenant)

    @property
    def num_free_slots(self) -> int:
        return self._batch.num_free

    def expected_wait(self) -> float:
        """Estimated seconds until a request that arrives now has its first step."""
        ahead = self.num_waiting, self._admission.queue.num_left
        return self._admission.wait_seconds(ahead, self.num_free_slots, len(self.running))

    def least_seconds(self, seq: Sequence) -> float:
        """Estimated seconds until a sequence that arrives now can be finished at best."""
        self._admission.measure(seq)
        ahead = self._admission.queue.ahead_of(seq)
        wait = self._admission.wait_seconds(ahead, self.num_free_slots, len(self.running))
        return wait + self._forecast.least(seq)

    # -- events ----------------------------------------------------------------------------------

    def add(self, seq: Sequence, now: float) -> None:
        """Queue a new sequence."""
        self._admission.advance_clock(now)
        seq.timeline.note(now, self._landed, "queued", self.num_waiting)
        self._admission.push(seq)

    def finish(self, seq: Sequence, now: float) -> None:
        """End a sequence; its tokens in flight are dropped, its computed pages stay cached."""
        if seq.state is SeqState.FINISHED:
            return
        self._admission.advance_clock(now)
        seq.timeline.note(now, self._landed, "finished", len(seq.tokens))
        if len(seq.tokens) > seq.num_prompt and not seq.kv.corrupt:
            self._forecast.saw_output(seq, seq.num_output)
        if seq.state is SeqState.RUNNING:
            self._pin(seq, now)
            self._leave(seq)
        elif seq.slot >= 0:
            self._num_preempted -= 1  # and settling
        else:
            self._admission.drop(seq)
        seq.state, seq.wanted = SeqState.FINISHED, False

    def policy_failures(self) -> dict[int, Exception]:
        """The ids of those that the policy raised for since the last call; the caller ends them.

        Until then they are last in the queue.
        """
        return self._guard.take_failures()

    def missed_deadlines(self) -> list[Sequence]:
        """Waiting sequences that can no longer meet their deadline; the caller ends them."""
        return list(self._admission.missed.values())

    # -- planning --------------------------------------------------------------------------------

    def plan(self, number: int, now: float) -> Planned | None:
        """The next step, or None when nothing can run before another event.

        Args:
            number: the step's, one more than the last.
            now: seconds; only timelines and pins depend on it.
        """
        step = Step(number)
        self._admission.advance_clock(now)
        if self._trials.active:
            self._run_trials(step, now)
        self._decode.plan(step, now, self.num_waiting)
        if step.decode_steps == 1:
            self._prefill.plan(step, now)
            for seq in step.admitted:
                self.running[seq.id] = seq
        self._admission.explain(self._batch.num_free)
        num_tokens = step.shape.num_tokens * step.decode_steps
        if step.has_rows:
            if self.limits.host_pages:
                self._copies.back_up(num_tokens, self._admission.pages_soon() + len(step.decodes))
        elif self.in_flight or not self._copies.outstanding:
            return None
        # A plan without rows only waits for the copies.
        self.in_flight.append(step)
        has_states = self.limits.num_states > 0
        message = step.message(self._copies.send(number), has_states=has_states)
        return Planned(message, step.admitted, num_tokens, len(step.decodes))

    def _run_trials(self, step: Step, now: float) -> None:
        """Let only the group on trial run."""
        while self._admission.make_room():
            pass  # those about to enter wait again, and leave their pages to the group
        if not self._trials.advance():
            return
        for seq in list(self.running.values()):
            self._preempt(seq, step, now)
        self._admission.stop_sharing()

    def _make_room(self, step: Step, now: float) -> bool:
        """Take pages from a sequence; False when some are already on their way back."""
        if self._settling or self._copies.outstanding:
            return False
        if self._admission.make_room():
            return True
        # The oldest is never preempted, so there is always progress.
        _, *others = sorted(self.running.values(), key=lambda seq: seq.id)
        if not others:
            raise RuntimeError("the KV cache cannot hold one sequence of max_model_len")
        self._preempt(min(others, key=self._loss), step, now)
        return True

    def _loss(self, seq: Sequence) -> tuple[int, int, int]:
        """Order of preemption: least urgent first, then least work to repeat, then youngest."""
        _, computed_here, _ = self._batch.work(seq)
        return (-seq.service.priority, computed_here, -seq.id)

    def _preempt(self, seq: Sequence, step: Step, now: float) -> None:
        """Send a sequence back to the queue with its tokens; its full pages stay cached."""
        seq.timeline.note(now, step.number, "preempted", len(seq.tokens))
        step.drop_pages(seq.slot)
        self.num_preemptions += 1
        self._num_preempted += 1
        seq.state = SeqState.WAITING
        self._leave(seq)

    # -- results ---------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> Applied:
        """Take in the result of the oldest step in flight.

        Rows of ended sequences, and rows that sampled nothing, give no tokens.

        Args:
            now: seconds; only timelines depend on it.
        """
        step = self.in_flight.popleft()
        for number, took in result.copied:
            self._copies.done(number, took)
        emitted: list[Emitted] = []
        failed: list[Sequence] = []
        parts: list[PromptPart] = [*result.prompts, *result.pooled]
        owners = [(step.chunks[part.row - len(step.decodes)].seq, part) for part in parts]
        read = [(seq, part) for seq, part in owners if seq.wanted]
        if result.error is not None:
            failed = self._fail(step, now)
        elif step.has_rows:
            unmet = {row for row, _ in result.failures}
            emitted = self._take_tokens(step, unpack(result.tokens).tolist(), unmet, now)
            seconds = result.seconds / step.decode_steps
            if not step.reads:
                self.times.observe(step.shape, seconds)
            num_rows = len(step.decodes)
            self._forecast.saw_step(seconds, num_rows, step.shape.num_tokens - num_rows)
        self._landed = step.number
        for seq in self._settling.pop(step.number, ()):
            self._settle(seq)
        self._admission.stop_sharing()
        return Applied(emitted, failed, read)

    def _take_tokens(
        self, step: Step, tokens: list[int], unmet: set[int], now: float
    ) -> list[Emitted]:
        """``unmet``: rows whose constraints allowed no token; their KV is valid."""
        emitted = []
        decodes = step.decodes
        for first in range(0, step.decode_steps * len(decodes), len(decodes) or 1):
            for row, seq in enumerate(decodes, first):
                if tokens[row] == BAD_TOKEN:  # also of sequences that have ended
                    seq.kv.corrupt |= row not in unmet
                if seq.wanted:
                    emitted.append(self._take_token(seq, row, tokens[row], now))
        for row, chunk in enumerate(step.chunks, len(step.decodes)):
            seq, token = chunk.seq, tokens[row]
            seq.kv.corrupt |= token == BAD_TOKEN and row not in unmet
            if not seq.kv.corrupt:
                self.cache.land(seq.kv, chunk.end)
            if seq.wanted and seq.reads.pending:
                seq.reads.done = chunk.end
            if chunk.samples and seq.wanted:
                emitted.append(self._take_first_token(seq, row, token, now))
        return emitted

    def _take_first_token(self, seq: Sequence, row: int, token: int, now: float) -> Emitted:
        """The token after the prompt, unless the sequence was to generate none."""
        if len(seq.tokens) < seq.output.max_length or token == BAD_TOKEN:
            return self._take_token(seq, row, token, now)
        self.finish(seq, now)
        return Emitted(seq, row, NO_TOKEN, FinishReason.LENGTH)

    def _take_token(self, seq: Sequence, row: int, token: int, now: float) -> Emitted:
        if token == BAD_TOKEN:
            self.finish(seq, now)
            return Emitted(seq, row, token, None)
        tokens, output = seq.tokens, seq.output
        tokens.append(token)
        finish = None
        if token in output.stop_ids and len(tokens) > output.min_length:
            finish = FinishReason.STOP
        elif len(tokens) >= output.max_length:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.finish(seq, now)
        return Emitted(seq, row, token, finish)

    def _fail(self, step: Step, now: float) -> list[Sequence]:
        """Distrust all KV of the step's sequences; returns the sequences that end.

        A sequence that was alone in the step ends. Of several, each is tried again.
        """
        rows = {seq.id: seq for seq in (*step.decodes, *(chunk.seq for chunk in step.chunks))}
        alive = [seq for seq in rows.values() if seq.wanted]
        for seq in rows.values():
            seq.kv.corrupt = True
        causes = alive
        if len(rows) > 1 and alive:
            computed = self._batch.computed
            suspects = [(seq, int(computed[seq.slot])) for seq in alive]
            causes = self._trials.suspect(suspects, step.admitted)
            for seq in alive:
                seq.wanted = False
        for seq in causes:
            self.finish(seq, now)
        return causes

    def _pin(self, seq: Sequence, now: float) -> None:
        """Pin the pages of a sequence that ends for as long as it asked."""
        if not (ttl := seq.kv.ttl) or seq.kv.corrupt:
            return
        landed, tenant = self._batch.landed(seq), seq.service.tenant
        if pages := self.cache.pin(seq.kv, landed, tenant, now + ttl):
            seq.timeline.note(now, self._landed, "pinned", pages, round(1e3 * ttl))

    def _leave(self, seq: Sequence) -> None:
        """Leave the batch; slot and pages follow when no step in flight has a row of it."""
        del self.running[seq.id]
        self._batch.stop(seq)
        self._admission.left(seq)
        if not seq.kv.corrupt:
            self.cache.commit(seq.kv, self._batch.landed(seq))
        last = int(self._batch.last_step[seq.slot])
        if last > self._landed:
            self._settling.setdefault(last, []).append(seq)
        else:
            self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        waits = seq.state is SeqState.WAITING
        computed, new_tokens, generated = self._batch.work(seq)
        self._admission.settle(seq, new_tokens + (OUTPUT_COST - 1) * generated)
        if seq.kv.corrupt:
            self.cache.discard(seq.kv)
        else:
            self.cache.release(seq.kv, computed, cold=seq.kv.ttl == 0 and not waits)
        self._batch.vacate(seq)
        if waits:
            self._num_preempted -= 1
            seq.kv.corrupt, seq.wanted = False, True
            self._admission.push(seq)
