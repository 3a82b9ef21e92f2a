"""The engine: requests in, steps out, tokens delivered; on the event loop, without a task."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextvars import Context
from typing import Final

from asyncllm.config import EngineLimits
from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.requests.check import check_deadline, check_request, check_ttl
from asyncllm.engine.requests.history import History, RequestTrace
from asyncllm.engine.requests.live import Requests
from asyncllm.engine.requests.request import Request, reader_of
from asyncllm.engine.requests.reservations import Reservation, Reservations
from asyncllm.engine.requests.stream import OutputStream
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence
from asyncllm.engine.scheduling.step import Emitted
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.steps import StepsInFlight
from asyncllm.engine.vitals import Vitals
from asyncllm.errors import DeadlineExceeded, EngineDead, PolicyError, StepError
from asyncllm.text.decoding import Detokenizer
from asyncllm.types import SamplingParams, SchedulingParams, Sink
from asyncllm.wire.executor import Executor
from asyncllm.wire.messages import StepResult, check_params

log = logging.getLogger(__name__)

POLICY_FAILED: Final = "the scheduling policy failed on this request"
#: Tokens delivered in one turn of the loop: up to 5 ms of work. More are delivered in several
#: turns, with sockets served in between.
DELIVERIES_PER_TURN: Final = 128


class Engine:
    """Owns the requests and keeps up to ``steps_in_flight`` steps with the executor.

    The executor calls ``_on_result`` on the loop. In that same turn of the loop the engine applies
    the result, plans and submits the next step, and only then detokenizes and delivers, so the
    device never waits for text.
    """

    def __init__(
        self,
        limits: EngineLimits,
        executor: Executor,
        scheduler: Scheduler,
        detokenizer: Callable[[bool, Seq[int], tuple[int, ...]], Detokenizer],
        *,
        drafting: Callable[[int, SamplingParams], Drafting | None] = lambda *_: None,
        clock: Callable[[], float] = time.perf_counter,
        shared: Callable[[Seq[int]], int] = lambda prompt: 0,
    ):
        """Nothing runs before ``start``.

        Args:
            detokenizer: makes one for a sequence, like ``Tokenizer.detokenizer``.
            drafting: of a new sequence, given the number of its prompt tokens.
            clock: seconds; the executor's results must use the same.
            shared: see ``BlockTable``, given a prompt.
        """
        self.limits = limits
        self.stats = EngineStats()
        self.history = History()
        self.reservations = Reservations(scheduler.backlog, limits)
        self._detokenizer, self._drafting, self._shared = detokenizer, drafting, shared
        self._clock = clock
        self._scheduler = scheduler
        self._requests = Requests(scheduler, self.stats, self.history, clock)
        self.view = self._requests.view
        self._steps = StepsInFlight(
            executor, limits.steps_in_flight, self._on_result, self.stats, self.history
        )
        self.vitals = Vitals(executor.heartbeat, scheduler, self._requests, self.history)
        self._outcomes: deque[bytes | EngineDead] = deque()  # of steps, not looked at yet
        self._undelivered: tuple[list[Emitted], StepResult] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False  # ``_advance`` is called in the next turn of the loop
        self._busy = False  # a step was submitted since slots and pages were counted
        self._next_id = 0
        self._stopped = asyncio.Event()
        self._dead: str | None = None
        self._seeds = random.Random()
        self.stats.update_gauges(scheduler)

    # -- life ------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def now(self) -> float:
        """Seconds of its clock."""
        return self._clock()

    async def stopped(self) -> str:
        """Wait until the engine has ended; returns why."""
        await self._stopped.wait()
        return self._dead or ""

    def start(self) -> None:
        """Begin to run steps on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._advance_soon()

    async def aclose(self) -> None:
        """Stop running steps; requests still unfinished fail with EngineDead."""
        self._die("engine closed")

    def give_up(self, cause: str) -> None:
        """Its step in flight will never end: all requests fail with EngineDead."""
        self._die(cause)

    # -- requests --------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        *,
        arrival: float | None = None,
        reservation: Reservation | None = None,
    ) -> int:
        """Queue a request; its output goes to ``sink``. Returns the id that ``abort`` takes.

        Args:
            arrival: when the request that this one is a part of arrived, in the engine's time. A
                part has that request's place in the queue and its deadline; it is not refused when
                the queue is full, and not counted as a request.
            reservation: gives the request its place; else it is refused when the queue is full.

        Raises:
            BadRequest: it can never be served (empty, too long, a token id out of range), or its
                ``cache_ttl_s`` is above the limit.
            TypeError: the prompt is not made of integers.
            QueueFull: too much is waiting already.
            DeadlineExceeded: it cannot be served in time.
            PolicyError: the scheduling policy raised an exception for it.
            EngineDead: the executor is gone.

        If it raises, nothing of the request is left behind.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        scheduling = scheduling or SchedulingParams()
        check_ttl(scheduling, self.limits)
        prompt, max_length = check_request(prompt_ids, params, self.limits)
        if reservation is not None:
            reservation.take(len(prompt))
        elif arrival is None:
            self.reservations.check(len(prompt), 1, scheduling.tenant)
        self._next_id += 1
        now, eos_ids = self._clock(), self.limits.eos_token_ids
        seq = Sequence(
            self._next_id,
            prompt,
            params,
            scheduling,
            max_length=max_length,
            eos_ids=eos_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            arrival=now if arrival is None else arrival,
        )
        seq.drafting, seq.kv.shared = self._drafting(len(prompt), params), self._shared(prompt)
        check_params(seq.output.params)
        texts = (params.skip_special_tokens, prompt, params.shown_special_tokens)
        stream = OutputStream(params, sink, self._detokenizer(*texts), eos_ids, now, seq.drafting)
        request = Request(seq, stream, is_part=arrival is not None, reader=reader_of(seq))
        left = FOREVER
        if scheduling.deadline_ms is not None:
            left = scheduling.deadline_ms / 1000 - (now - seq.service.arrival)
            needed = self._scheduler.backlog.least_seconds(seq)
            self._end_unranked(seq)
            check_deadline(left, needed)
        self._scheduler.add(seq, now)
        try:
            self._end_unranked(seq)
        except PolicyError:
            self._scheduler.finish(seq, now)
            raise
        self._requests.add(request)
        if left < FOREVER:
            request.expiry = asyncio.get_running_loop().call_later(left, self._expire, seq)
        self._changed()
        return seq.id

    def abort(self, request_id: int) -> None:
        """Drop a request before the next plan. Unknown and ended ids are ignored."""
        if self._requests.abort(request_id):
            self._changed()

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        """What happened to a request; None when it is unknown or forgotten.

        Args:
            steps: include the steps that ran meanwhile, which takes longest.
        """
        return self._requests.trace(request_id, steps=steps)

    def _expire(self, seq: Sequence) -> None:
        message = "the request's deadline has passed"
        self._requests.drop([seq], DeadlineExceeded, message, "deadline")
        self._changed()

    def _end_missed(self) -> None:
        """End waiting requests that can no longer meet their deadline."""
        missed = self._scheduler.missed_deadlines()
        if missed:
            message = "the request's deadline can no longer be met"
            self._requests.drop(missed, DeadlineExceeded, message, "deadline")
            self._changed()

    def _end_unranked(self, newcomer: Sequence | None = None) -> None:
        """End the requests that the policy has raised for.

        Raises:
            PolicyError: the newcomer is one of them; the caller ends it.
        """
        refused: Exception | None = None
        for id, error in self._scheduler.policy_failures().items():
            log.error("the policy failed on request %d", id, exc_info=error)
            if newcomer is not None and id == newcomer.id:
                refused = error
                continue
            self._requests.drop(self._requests.sequences(id), PolicyError, POLICY_FAILED, "policy")
            self._changed()
        if refused is not None:
            raise PolicyError(POLICY_FAILED) from refused

    def _changed(self) -> None:
        """Requests came or went: plan again, once for all that do so in this turn of the loop."""
        self.stats.update_gauges(self._scheduler)
        self._advance_soon()

    # -- steps -----------------------------------------------------------------------------------

    def _on_result(self, outcome: bytes | EngineDead) -> None:
        """The executor is done with the oldest step."""
        self._outcomes.append(outcome)
        if not self._scheduled:  # else that call takes it, in the next turn at the latest
            self._advance()

    def _advance_soon(self) -> None:
        if self._loop is not None and not self._scheduled:
            self._scheduled = True
            # In a context of its own: whoever adds a request has no part in planning.
            self._loop.call_soon(self._advance, context=Context())

    def _advance(self) -> None:
        """Do one thing: go on delivering a step, take the next result, or plan."""
        self._scheduled = False
        if self._dead is not None:
            return
        try:
            if self._undelivered is not None:
                self._deliver(*self._undelivered)
            elif self._outcomes:
                self._take(self._outcomes.popleft())
            else:
                self._fill()
                return
        except EngineDead as error:
            self._die(error.message)
        except BaseException as error:
            self._die("the engine stopped after an internal error; its log has the cause")
            if not isinstance(error, Exception):  # such as KeyboardInterrupt, which ends the loop
                raise
            log.exception("the engine stopped")
        # What was delivered may have ended requests, which lets others run. A result that arrives
        # in this turn of the loop waits for that call too: a turn delivers once.
        self._advance_soon()

    def _take(self, outcome: bytes | EngineDead) -> None:
        """Apply a result, submit what follows from it, and begin to deliver it.

        Raises:
            EngineDead: the executor has died.
        """
        if isinstance(outcome, EngineDead):
            raise outcome
        started = time.perf_counter()
        now = self._clock()
        result = self._steps.take(outcome, now)
        applied = self._scheduler.apply(result, now)
        self._requests.cancels.step_ended(now)
        self.stats.cpu_apply += time.perf_counter() - started
        self._fill()
        if applied.read:
            self._requests.deliver_prompts(applied.read)
        for seq in applied.failed:
            log.error("request %d made step %d fail: %s", seq.id, result.step, result.error)
        message = "the model could not compute this request; the server's log has the cause"
        self._requests.fail(applied.failed, StepError, message, "step")
        self._deliver(applied.emitted, result)

    def _fill(self) -> None:
        """Plan and submit until the executor has enough to do."""
        started = time.perf_counter()
        while self._steps.has_room:
            now = self._clock()
            planned = self._scheduler.plan(self._steps.next_number, now)
            if planned is None:
                self._steps.flush()
                if self._busy and self._scheduler.idle:
                    self._check_leaks()
                break
            if planned.admitted:
                self._requests.started(planned.admitted, now)
            self._steps.submit(planned, now)
            self._busy = True
        self._end_unranked()
        self._end_missed()
        self.stats.cpu_plan += time.perf_counter() - started

    def _check_leaks(self) -> None:
        """The engine has become idle: pages or slots that are lost are found, and free again."""
        self._busy = False
        self.stats.books_checks += 1
        mismatch = self._scheduler.leak_check.mismatch()
        if mismatch is not None:
            self._scheduler.leak_check.heal()
            self.stats.books_healed += 1
            log.error("the KV books do not balance; the prefix cache starts anew: %s", mismatch)

    def _deliver(self, rows: list[Emitted], result: StepResult) -> None:
        """Deliver as much of a step as belongs in one turn of the loop."""
        started = time.perf_counter()
        self._requests.deliver(rows[:DELIVERIES_PER_TURN], result)
        rest = rows[DELIVERIES_PER_TURN:]
        self._undelivered = (rest, result) if rest else None
        self.stats.update_gauges(self._scheduler)
        self.stats.cpu_deliver += time.perf_counter() - started

    def _die(self, cause: str) -> None:
        if self._dead is None:
            self._dead = cause
        self._stopped.set()
        self._requests.fail_all(self._dead)
        self.stats.stopped()
