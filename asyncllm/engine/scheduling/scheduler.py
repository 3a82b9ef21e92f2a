"""The scheduler: which rows the next step computes, and what a finished step means.

Iteration-level scheduling (Yu et al., ORCA, OSDI 2022) without phases: a step is a list of rows,
each with the next positions of one sequence; a decode row has one position. Decode rows come first.
Prompt chunks share the rest of the step (Agrawal et al., Sarathi-Serve, OSDI 2024), in the order of
a policy.

Pure: no torch, no I/O, no clock. The same calls in the same order give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Self

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.state_slots import StateSlots
from asyncllm.engine.drafts.drafting import Tally
from asyncllm.engine.policy import Policy, PolicyGuard
from asyncllm.engine.scheduling.backlog import Backlog
from asyncllm.engine.scheduling.batch import LeakCheck, RunningBatch
from asyncllm.engine.scheduling.copies import PageCopies
from asyncllm.engine.scheduling.decode import DecodePlanner
from asyncllm.engine.scheduling.departures import Departures
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.pace import EvenPace, GreedyPace
from asyncllm.engine.scheduling.prefill import PrefillPlanner
from asyncllm.engine.scheduling.recurrent import RecurrentStates
from asyncllm.engine.scheduling.results import Results
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.speculation.choice import Choice, Speculation
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from asyncllm.engine.scheduling.states import NoStates, States
from asyncllm.engine.scheduling.step import Applied, Emitted, Planned, PromptPart, Step
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.engine.scheduling.trials import Trials
from asyncllm.engine.scheduling.waiting.admission import Admission
from asyncllm.engine.scheduling.waiting.deadlines import Deadlines
from asyncllm.engine.scheduling.waiting.waiting import Waiting
from asyncllm.wire.messages import StepResult, unpack


class Scheduler:
    """Puts together those who own the sequences' state, slots and pages, and passes events to them.

    Steps are applied in the order in which they were planned.

    Attributes:
        backlog: what waits, for those who ask.
        batch: who runs.
        departures: who was preempted, or has ended.
        in_flight: the steps that are planned and not applied, the oldest first.
        leak_check: whether all pages and slots are accounted for.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache: KVCacheManager,
        policy: Policy,
        times: StepTimeModel,
        states: States,
        speculation: Speculation | None,
    ):
        self.limits = limits
        self.policy = policy
        self.cache = cache
        self.times = times
        self._states = states
        self.in_flight: deque[Step] = deque()
        self.batch = batch = RunningBatch(limits.max_num_seqs, limits.page_size)
        batch.keep_at = states.positions()
        self.leak_check = LeakCheck(cache, batch)
        self._guard = guard = PolicyGuard(policy)
        self._forecast = forecast = Forecast(times)
        self._copies = copies = PageCopies(cache, times)
        self._trials = trials = Trials()
        waiting = Waiting(cache, guard, forecast, copies, most_sharing=limits.max_num_seqs)
        deadlines = Deadlines(waiting, forecast)
        self._admission = admission = Admission(
            limits, cache, forecast, copies, trials, waiting, deadlines
        )
        self.departures = departures = Departures(cache, copies, admission, batch, states)
        self.backlog = Backlog(
            limits, cache, forecast, copies, trials, admission, batch, departures
        )
        evenly = policy.evenly and not limits.itl_target  # a target gives steps their size
        pace = EvenPace(limits, forecast, times) if evenly else GreedyPace()
        self._prefill = PrefillPlanner(
            limits, cache, guard, forecast, times, copies, admission, batch, states, pace
        )
        self._speculation = speculation or LearnedSpeculation(limits, times, forecast)
        self._decode = DecodePlanner(
            limits, cache, forecast, copies, admission, batch, departures, states, self._speculation
        )
        self._results = Results(cache, batch, trials, self._speculation, self.finish)

    @classmethod
    def create(
        cls, limits: EngineLimits, policy: Policy, speculation: Speculation | None = None
    ) -> Self:
        """A scheduler with an empty cache and no step times yet.

        Args:
            speculation: decides what is drafted; by default, what is expected to pay.
        """
        times = StepTimeModel(limits.page_copy_seconds, limits.step_sizes)
        if not limits.num_states:
            return cls(
                limits, KVCacheManager.create(limits), policy, times, NoStates(), speculation
            )
        host_size = limits.state_pages if limits.host_pages else 0
        slots = StateSlots(limits.num_states, limits.max_num_seqs, host_size)
        cache = KVCacheManager.create(limits, slots)
        states = RecurrentStates(limits, cache, slots)
        return cls(limits, cache, policy, times, states, speculation)

    @property
    def idle(self) -> bool:
        """No sequence has anything, and nothing is under way."""
        busy = self.batch.running or self.departures or self.in_flight or self._copies.outstanding
        return not (busy or self.backlog.num_waiting)

    @property
    def choice(self) -> Choice:
        """What the last plan chose to draft."""
        return self._decode.choice

    @property
    def drafted(self) -> Mapping[str, Tally]:
        """Drafted tokens by kind; empty while there were none."""
        return self._speculation.tallies

    def policy_failures(self) -> dict[int, Exception]:
        """The ids of those that the policy raised for since the last call; the caller ends them.

        Until then they are last in the queue.
        """
        return self._guard.take_failures()

    def missed_deadlines(self) -> list[Sequence]:
        """Waiting sequences that can no longer meet their deadline; the caller ends them."""
        return list(self._admission.deadlines.missed.values())

    # -- events ----------------------------------------------------------------------------------

    def add(self, seq: Sequence, now: float) -> None:
        """Queue a new sequence."""
        self._advance_clock(now)
        seq.timeline.note(now, self.departures.last_done, "queued", self.backlog.num_waiting)
        for other in self.batch.prefilling.values():
            self._states.expect(other, self.batch.remaining(other)[0], seq)
        self._admission.waiting.push(seq)

    def finish(self, seq: Sequence, now: float) -> None:
        """End a sequence; its tokens in flight are dropped, its computed pages stay cached."""
        if seq.state is SeqState.FINISHED:
            return
        self._advance_clock(now)
        seq.timeline.note(now, self.departures.last_done, "finished", len(seq.tokens))
        if seq.num_output and not seq.kv.corrupt:
            self._forecast.saw_output(seq, seq.num_output)
        if seq.slot >= 0:
            self.departures.end(seq, now)
        else:
            self._admission.drop(seq)
        seq.state, seq.wanted = SeqState.FINISHED, False

    def _advance_clock(self, now: float) -> None:
        """Account for the time since the last call: the waits, and pins that expire."""
        self._admission.deadlines.advance_clock(now)
        self._admission.waiting.clock.advance_clock(now)
        self.cache.expire_pins(now)

    def plan(self, number: int, now: float) -> Planned | None:
        """The next step, or None when nothing can run before another event.

        Args:
            number: the step's, one more than the last.
            now: seconds; only timelines and pins depend on it.
        """
        step = Step(number)
        self._advance_clock(now)
        self._admission.waiting.stop_sharing()
        if self._trials.active:
            self._run_trials(step, now)
        self._decode.plan(step, now, self.backlog.num_waiting)
        if step.decode_steps == 1:
            self._prefill.plan(step, now)
        self._admission.explain(self.batch.num_free)
        num_tokens = step.shape.num_tokens * step.decode_steps
        if step.has_rows:
            if self.limits.host_pages:
                soon = self._admission.pages_soon() + len(step.decodes)
                newcomers = min(self.batch.num_free, len(self._admission.waiting))
                self._copies.back_up(num_tokens, soon, newcomers)
        elif self.in_flight or not self._copies.outstanding:
            assert not step.new_pages, "the device is told of every page"
            return None
        # A plan without rows only waits for the copies.
        self.in_flight.append(step)
        message = step.message(self._copies.send(number), self._states)
        return Planned(message, step.admitted, num_tokens, step.num_decodes)

    def _run_trials(self, step: Step, now: float) -> None:
        """Let only the group on trial run."""
        while self._admission.make_room():
            pass  # those about to enter wait again, and leave their pages to the group
        if not self._trials.advance():
            return
        for seq in list(self.batch.running.values()):
            self.departures.preempt(seq, step, now)
        self._admission.waiting.stop_sharing()

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
        owners = [(step.chunks[part.row - step.num_decodes].seq, part) for part in parts]
        read = [(seq, part) for seq, part in owners if seq.wanted]
        if result.error is not None:
            failed = self._results.fail(step, now)
        elif step.has_rows:
            unmet = {row for row, _ in result.failures}
            emitted = self._results.take(step, unpack(result.tokens).tolist(), unmet, now)
            seconds = result.seconds / step.decode_steps
            heads = step.ahead and not step.drafts
            decodes_only = not step.chunks and step.decode_steps == 1 and not heads
            shape = step.shape if decodes_only else None
            self._speculation.step_done(step.number, shape, seconds, now)
            if not step.drafts and not step.ahead:
                if not step.reads:
                    self.times.observe(step.shape, seconds)
                num_rows = len(step.decodes)
                self._forecast.saw_step(seconds, num_rows, step.shape.num_tokens - num_rows)
        self._states.step_done(step.number, good=result.error is None)
        self.departures.step_done(step.number)
        self.batch.resume(step.number)
        self._admission.waiting.stop_sharing()
        return Applied(emitted, failed, read)
