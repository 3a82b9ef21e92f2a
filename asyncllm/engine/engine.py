"""The engine: requests in, steps out, tokens delivered; one coroutine on the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from asyncllm.config import EngineLimits
from asyncllm.engine.check import check_request
from asyncllm.engine.history import History, RequestTrace
from asyncllm.engine.prompt_reader import PromptReader, reader_of
from asyncllm.engine.scheduler import Applied, Emitted, Scheduler
from asyncllm.engine.sequence import Sequence
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.stream import OutputStream
from asyncllm.errors import (
    AsyncLLMError,
    ConstraintError,
    DeadlineExceeded,
    EngineDead,
    QueueFull,
    StepError,
)
from asyncllm.executor.executor import Executor
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.types import (
    FinishReason,
    SamplingParams,
    SchedulingParams,
    Sink,
    TokenLogprob,
)
from asyncllm.wire.messages import (
    BAD_TOKEN,
    PooledPrompt,
    RowLogprobs,
    ScoredPrompt,
    StepResult,
    decode_result,
    encode,
)

log = logging.getLogger(__name__)


#: One tenant may fill the queue until so many times what is left of it is its own.
TENANT_SHARE = 8
#: Retry-After is the time in which this share of the queue is served, and at least a second.
RETRY_SHARE = 0.1


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    stream: OutputStream
    is_part: bool
    reader: PromptReader | None = None
    expiry: asyncio.TimerHandle | None = None

    def stop_clock(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()


class Engine:
    """Owns the requests and keeps up to ``steps_in_flight`` steps with the executor.

    Two steps in flight: step N+1 is planned before N's tokens are known, which lengths allow. When
    N is back the loop applies it and submits N+2 first, and only then detokenizes and delivers N,
    so the device never waits for text.
    """

    def __init__(
        self,
        limits: EngineLimits,
        executor: Executor,
        scheduler: Scheduler,
        detokenizer: Callable[[bool, Seq[int], tuple[int, ...]], Detokenizer],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Nothing runs before ``start``.

        Args:
            detokenizer: as ``Tokenizer.detokenizer``, makes one for a sequence.
            clock: seconds; the executor's results must be in the same.
        """
        self.limits = limits
        self.stats = EngineStats()
        self.history = History()
        self._executor = executor
        self._detokenizer = detokenizer
        self._clock = clock
        self._scheduler = scheduler
        self._requests: dict[int, _Request] = {}
        self._steps: deque[asyncio.Future[bytes]] = deque()
        self._next_id = 0
        self._next_step = 0
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._dead: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._seeds = random.Random()
        self._update_gauges()

    # -- requests --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def now(self) -> float:
        """Seconds of its clock."""
        return self._clock()

    async def stopped(self) -> str:
        """Wait until no more steps will run; returns why."""
        await self._stopped.wait()
        return self._dead or ""

    def start(self) -> None:
        """Begin to run steps on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="asyncllm-engine")
        # However it ends, cancelled by a stranger included, nobody is left waiting.
        self._task.add_done_callback(lambda _: self._die("the engine's task has ended"))

    async def aclose(self) -> None:
        """Stop running steps; requests still unfinished fail with EngineDead."""
        self._die("engine closed")
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    def add(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        *,
        arrival: float | None = None,
    ) -> int:
        """Queue a request; its output goes to ``sink``. Returns the id that ``abort`` takes.

        Args:
            arrival: of the request that this one is a part of, in the engine's time. A part has
                that one's place in the queue and its deadline; it is not refused for want of room,
                and not counted as a request.

        Raises:
            BadRequest: it can never be served (empty, too long, a token id out of range).
            QueueFull: too much is waiting already.
            DeadlineExceeded: it cannot be served in time.
            EngineDead: the executor is gone.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        scheduling = scheduling or SchedulingParams()
        max_length = check_request(prompt_ids, params, self.limits)
        if arrival is None:
            self.check_room(len(prompt_ids), tenant=scheduling.tenant)
        self._next_id += 1
        now = self._clock()
        seq = Sequence(
            self._next_id,
            prompt_ids,
            params,
            scheduling,
            max_length=max_length,
            eos_ids=self.limits.eos_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            arrival=now if arrival is None else arrival,
        )
        stream = OutputStream(
            params,
            sink,
            self._detokenizer(params.skip_special_tokens, prompt_ids, params.shown_special_tokens),
            self.limits.eos_token_ids,
            now,
        )
        request = _Request(seq, stream, is_part=arrival is not None, reader=reader_of(seq))
        if scheduling.deadline_ms is not None:
            self._set_deadline(request, scheduling.deadline_ms / 1000 - (now - seq.arrival))
        self._requests[seq.id] = request
        self._scheduler.add(seq, now)
        self._update_gauges()
        self._wake.set()
        return seq.id

    def check_room(self, num_tokens: int, num_requests: int = 1, tenant: str = "") -> None:
        """Whether prompts of at least so many tokens in all may join the queue.

        A tenant may have a multiple of what is left of the queue, so that there is always something
        left for another (dynamic thresholds; Choudhury and Hahne, IEEE/ACM ToN 1998).

        Raises:
            QueueFull: not now; ``retry_after`` says when.
        """
        scheduler, limits = self._scheduler, self.limits
        waiting, tokens = scheduler.num_waiting, scheduler.num_waiting_tokens
        # Those that the next plan takes in are not waiting.
        places = limits.max_waiting + scheduler.num_free_slots - waiting
        room = limits.max_waiting_tokens - tokens
        fits = num_requests <= places and (waiting == 0 or num_tokens <= room)
        if fits and tenant and waiting:
            mine, my_tokens = scheduler.waiting_for(tenant)
            fits = mine + num_requests <= TENANT_SHARE * places
            fits = fits and my_tokens + num_tokens <= TENANT_SHARE * room
        if fits:
            return
        raise QueueFull(
            f"{waiting} requests with {tokens} prompt tokens are waiting already",
            retry_after=max(1.0, RETRY_SHARE * scheduler.expected_wait()),
        )

    def _set_deadline(self, request: _Request, seconds: float) -> None:
        """Refuse what cannot be done in so many seconds; drop it when they have passed."""
        needed = self._scheduler.least_seconds(request.sequence)
        if needed > seconds:
            raise DeadlineExceeded(
                f"the deadline of {seconds * 1000:.0f} ms cannot be met: the answer would take at "
                f"least {needed * 1000:.0f} ms",
                param="deadline_ms",
            )
        loop = asyncio.get_running_loop()
        request.expiry = loop.call_later(seconds, self._expire, request)

    def _expire(self, request: _Request) -> None:
        seq = request.sequence
        self._scheduler.finish(seq, self._clock())
        self._fail([seq], DeadlineExceeded, "the request's deadline has passed", how="deadline")
        self._update_gauges()
        self._wake.set()

    def abort(self, request_id: int) -> None:
        """Drop a request; it is not in the next plan. Unknown and ended ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        now = self._clock()
        self._scheduler.finish(request.sequence, now)
        self._close(request, FinishReason.ABORT.value, now)
        self._update_gauges()
        self._wake.set()

    # -- steps -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._dead is None:
                self._wake.clear()
                result = self._take_result()
                if result is None:
                    self._fill()
                    # A result may have landed, or a request been added, while filling.
                    await self._wake.wait()
                    continue
                started = time.perf_counter()
                applied = self._apply(result)
                self.stats.cpu_apply += time.perf_counter() - started
                self._fill()
                planned = time.perf_counter()
                if applied.read:
                    self._deliver_prompts(applied.read)
                self._deliver(applied.emitted, result)
                self._fail(applied.failed, StepError, f"the model step failed: {result.error}")
                self._update_gauges()
                self.stats.cpu_deliver += time.perf_counter() - planned
                # One turn of the loop per step: sockets are served even when the next result is
                # already there.
                await asyncio.sleep(0)
        except EngineDead as error:
            self._die(error.message)
        except Exception as error:
            log.exception("the engine stopped")
            self._die(f"the engine stopped: {error!r}")

    def _take_result(self) -> StepResult | None:
        if not self._steps or not self._steps[0].done():
            return None
        return decode_result(self._steps.popleft().result())

    def _fill(self) -> None:
        """Plan and submit until the executor has enough to do."""
        started = time.perf_counter()
        while len(self._steps) < self.limits.steps_in_flight:
            now = self._clock()
            planned = self._scheduler.plan(self._next_step, now)
            if planned is None:
                if self._steps:
                    self._executor.flush()
                break
            self._next_step += 1
            self.stats.step_submitted(planned.num_tokens, now, alone=not self._steps)
            for seq in planned.admitted:
                self._observe_start(self._requests[seq.id], now)
            self.history.planned(planned, now)
            future = self._executor.submit(encode(planned.message))
            future.add_done_callback(self._on_step_done)
            self._steps.append(future)
        self.stats.cpu_plan += time.perf_counter() - started

    def _on_step_done(self, _future: asyncio.Future[bytes]) -> None:
        self._wake.set()

    def _apply(self, result: StepResult) -> Applied:
        now = self._clock()
        self.stats.step_done(result, now, followed=bool(self._steps))
        self.history.done(result.step, result.t_done - result.seconds, result.seconds)
        return self._scheduler.apply(result, now)

    def _deliver(self, emitted: list[Emitted], result: StepResult) -> None:
        now = self._clock()
        by_row = {entry.row: entry for entry in result.logprobs}
        failures = dict(result.failures)
        for seq, row, token, finish in emitted:
            request = self._requests.get(seq.id)
            if request is None:
                continue  # aborted while its token was on the way
            if row in failures:
                self._fail([seq], ConstraintError, failures[row])
                continue
            if token < 0:
                self._end_without_token(request, token, finish, now)
                continue
            entry = by_row.get(row) if by_row else None
            logprob = None if entry is None else _token_logprob(token, entry)
            try:
                finish = request.stream.push(token, finish, logprob)
            except Exception as error:
                self._fail_delivery(seq, error)
                continue
            self._observe_token(request, now)
            if finish is not None:
                self._scheduler.finish(seq, now)
                self._end(request, finish, now)

    def _end_without_token(
        self, request: _Request, token: int, finish: FinishReason | None, now: float
    ) -> None:
        """A BAD_TOKEN, or the end of a request that was to generate nothing."""
        if token == BAD_TOKEN or finish is None:
            self._fail([request.sequence], StepError, "the model's logits were not finite")
            return
        self.stats.prompt_tokens += request.sequence.num_prompt
        try:
            request.stream.end(finish)
        except Exception as error:
            self._fail_delivery(request.sequence, error)
        else:
            self._end(request, finish, now)

    def _deliver_prompts(self, parts: list[tuple[Sequence, ScoredPrompt | PooledPrompt]]) -> None:
        for seq, part in parts:
            request = self._requests.get(seq.id)
            reader = None if request is None else request.reader
            if request is None or reader is None or not reader.add(part):
                continue
            request.reader = None
            try:
                request.stream.sink.emit(reader.delta())
            except Exception as error:
                self._fail_delivery(seq, error)

    def _fail_delivery(self, seq: Sequence, error: Exception) -> None:
        """One bad sink must not reach the others, nor stop the steps."""
        log.error("request %d could not be delivered", seq.id, exc_info=error)
        self._scheduler.finish(seq, self._clock())
        self._fail([seq], StepError, f"the output could not be delivered: {error!r}")

    def _observe_start(self, request: _Request, now: float) -> None:
        stream = request.stream
        if stream.started == 0.0:  # not when it comes back from a preemption
            stream.started = now
            stream.cached_tokens = request.sequence.num_cached
            if not request.is_part:
                self.stats.cached_tokens += stream.cached_tokens
                self.stats.queue_time.observe(now - stream.arrived)

    def _observe_token(self, request: _Request, now: float) -> None:
        stream, stats = request.stream, self.stats
        stats.generation_tokens += 1
        if stream.first == 0.0:
            stream.first = now
            if not request.is_part:
                stats.prompt_tokens += request.sequence.num_prompt
                stats.time_to_first_token.observe(now - stream.arrived)
        else:
            stats.inter_token_latency.observe(now - stream.last)
        stream.last = now

    def _end(self, request: _Request, finish: FinishReason, now: float) -> None:
        # A sink may have aborted its own request from within emit().
        if self._requests.pop(request.sequence.id, None) is None:
            return
        self._close(request, finish.value, now)
        if not request.is_part:
            self.stats.request_latency.observe(now - request.stream.arrived)

    def _fail(
        self,
        sequences: list[Sequence],
        kind: type[AsyncLLMError],
        message: str,
        *,
        how: str = "error",
    ) -> None:
        """Each request gets an error of its own: raising one adds to its traceback."""
        for seq in sequences:
            request = self._requests.pop(seq.id, None)
            if request is not None:
                self._close(request, how, self._clock())
                try:
                    request.stream.sink.fail(kind(message))
                except Exception:
                    log.exception("request %d could not be told of its failure", seq.id)

    def _close(self, request: _Request, how: str, now: float) -> None:
        """The last thing that happens to every request."""
        request.stop_clock()
        if not request.is_part:
            self.stats.finished[how] += 1
            self.history.ended(request.sequence, request.stream, how, now)

    def trace(self, request_id: int) -> RequestTrace | None:
        """What happened to a request that lives, or ended not long ago; None for others."""
        request = self._requests.get(request_id)
        if request is None:
            return self.history.trace(request_id)
        return self.history.live_trace(request.sequence, request.stream)

    def _die(self, cause: str) -> None:
        if self._dead is None:
            self._dead = cause
        self._stopped.set()
        self._wake.set()
        for future in self._steps:
            future.add_done_callback(_forget)
        sequences = [request.sequence for request in self._requests.values()]
        for seq in sequences:
            self._scheduler.finish(seq, self._clock())
        self._fail(sequences, EngineDead, self._dead)
        self._update_gauges()

    def _update_gauges(self) -> None:
        scheduler, stats = self._scheduler, self.stats
        stats.running = len(scheduler.running)
        stats.waiting = scheduler.num_waiting
        stats.preemptions = scheduler.num_preemptions
        stats.pages_total = scheduler.cache.num_pages
        stats.pages_held = scheduler.cache.num_held
        stats.pages_cached = scheduler.cache.num_cached
        stats.pages_evicted = scheduler.cache.num_evicted
        stats.host_pages_used = scheduler.cache.num_host_used


def _forget(future: asyncio.Future[bytes]) -> None:
    """Nobody waits for this step any more, whatever became of it."""
    if not future.cancelled():
        future.exception()


def _token_logprob(token: int, entry: RowLogprobs) -> TokenLogprob:
    top = tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return TokenLogprob(token, entry.sampled, top)
