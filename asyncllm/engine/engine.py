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

from asyncllm.cache.manager import KVCacheManager
from asyncllm.config import EngineLimits
from asyncllm.engine.scheduler import Emitted, Scheduler
from asyncllm.engine.sequence import Sequence
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.stream import OutputStream
from asyncllm.errors import AsyncLLMError, BadRequest, EngineDead, QueueFull, StepError
from asyncllm.executor.executor import Executor
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.types import FinishReason, SamplingParams, Sink, TokenLogprob
from asyncllm.wire.messages import (
    BAD_TOKEN,
    RowLogprobs,
    StepResult,
    decode_result,
    encode,
    unpack,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    sequence: Sequence
    stream: OutputStream


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
        detokenizer: Callable[[bool, Seq[int]], Detokenizer],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """``detokenizer(skip_special_tokens, prompt_ids)`` makes a new one for each sequence."""
        self.limits = limits
        self.stats = EngineStats()
        self._executor = executor
        self._detokenizer = detokenizer
        self._clock = clock
        self._scheduler = Scheduler(limits, KVCacheManager(limits.num_pages, limits.page_size))
        self._requests: dict[int, _Request] = {}
        self._steps: deque[asyncio.Future[bytes]] = deque()
        self._next_id = 0
        self._next_step = 0
        self._last_done = 0.0
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

    def add(self, prompt_ids: Seq[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request; its output goes to ``sink``. Returns the id that ``abort`` takes.

        Raises:
            BadRequest: it can never be served (empty, too long, a token id out of range).
            QueueFull: too many requests are waiting already.
            EngineDead: the executor is gone.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        max_length = self._check(prompt_ids, params)
        # Those that the next plan takes in are not waiting.
        if len(self._scheduler.waiting) >= self.limits.max_waiting + self._scheduler.num_free_slots:
            raise QueueFull(
                f"{len(self._scheduler.waiting)} requests are waiting already", retry_after=1.0
            )
        self._next_id += 1
        seq = Sequence(
            self._next_id,
            list(prompt_ids),
            params,
            max_length=max_length,
            eos_ids=self.limits.eos_token_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
        )
        stream = OutputStream(
            params,
            sink,
            self._detokenizer(params.skip_special_tokens, prompt_ids),
            self.limits.eos_token_ids,
            self._clock(),
        )
        self._requests[seq.id] = _Request(seq, stream)
        self._scheduler.add(seq)
        self._update_gauges()
        self._wake.set()
        return seq.id

    def abort(self, request_id: int) -> None:
        """Drop a request; it is not in the next plan. Unknown and ended ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._scheduler.finish(request.sequence)
        self.stats.finished[FinishReason.ABORT.value] += 1
        self._update_gauges()
        self._wake.set()

    def _check(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """The length at which the sequence must end."""
        room = self.limits.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise BadRequest("the prompt is empty", param="prompt")
        if room < 1 or (params.max_tokens is not None and params.max_tokens > room):
            asked = "" if params.max_tokens is None else f" and max_tokens {params.max_tokens}"
            raise BadRequest(
                f"the prompt of {len(prompt_ids)} tokens{asked} is more than the context of "
                f"{self.limits.max_model_len} tokens holds",
                param="prompt" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        if params.min_tokens > room:
            raise BadRequest(
                f"min_tokens must be at most {room}, the room left", param="min_tokens"
            )
        stops = len(params.stop_token_ids) + len(self.limits.eos_token_ids)
        if params.min_tokens and stops >= self.limits.vocab_size:
            raise BadRequest("stop_token_ids leave no token for min_tokens", param="stop_token_ids")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.limits.vocab_size:
            raise BadRequest(
                f"prompt token ids must be between 0 and {self.limits.vocab_size - 1}",
                param="prompt",
            )
        if any(t >= self.limits.vocab_size for t in params.stop_token_ids):
            raise BadRequest(
                f"stop_token_ids must be between 0 and {self.limits.vocab_size - 1}",
                param="stop_token_ids",
            )
        return len(prompt_ids) + (room if params.max_tokens is None else params.max_tokens)

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
                started = self._clock()
                emitted, failed = self._apply(result)
                applied = self._clock()
                self.stats.cpu_apply += applied - started
                self._fill()
                planned = self._clock()
                self._deliver(emitted, result.logprobs)
                self._fail(failed, StepError, f"the model step failed: {result.error}")
                self._update_gauges()
                self.stats.cpu_deliver += self._clock() - planned
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
        started = self._clock()
        while len(self._steps) < self.limits.steps_in_flight:
            plan = self._scheduler.plan(self._next_step)
            if plan is None:
                if self._steps:
                    self._executor.flush()
                break
            self._next_step += 1
            self.stats.step_tokens.observe(self._scheduler.planned_tokens)
            for seq in self._scheduler.admitted:
                self._observe_start(self._requests[seq.id].stream)
            future = self._executor.submit(encode(plan))
            future.add_done_callback(self._on_step_done)
            self._steps.append(future)
        self.stats.cpu_plan += self._clock() - started

    def _on_step_done(self, _future: asyncio.Future[bytes]) -> None:
        self._wake.set()

    def _apply(self, result: StepResult) -> tuple[list[Emitted], list[Sequence]]:
        self.stats.steps += 1
        # Steps overlap: a step is launched while the one before still runs.
        begun = max(result.t_launch, self._last_done)
        self._last_done = max(result.t_done, self._last_done)
        self.stats.device_busy += self._last_done - min(begun, self._last_done)
        if result.error is not None:
            self.stats.step_errors += 1
            return [], self._scheduler.fail()
        return self._scheduler.apply(unpack(result.tokens).tolist()), []

    def _deliver(self, emitted: list[Emitted], logprobs: tuple[RowLogprobs, ...]) -> None:
        now = self._clock()
        by_row = {entry.row: entry for entry in logprobs}
        for seq, row, token, finish in emitted:
            request = self._requests.get(seq.id)
            if request is None:
                continue  # aborted while its token was on the way
            if token == BAD_TOKEN:
                self._fail([seq], StepError, "the model's logits were not finite")
                continue
            entry = by_row.get(row) if by_row else None
            logprob = None if entry is None else _token_logprob(token, entry)
            try:
                finish = request.stream.push(token, finish, logprob)
            except Exception as error:
                # One bad sink must not reach the others, nor stop the steps.
                log.exception("request %d could not be delivered", seq.id)
                self._scheduler.finish(seq)
                self._fail([seq], StepError, f"the output could not be delivered: {error!r}")
                continue
            self._observe_token(request, now)
            if finish is not None:
                self._scheduler.finish(seq)
                self._end(request, finish, now)

    def _observe_start(self, stream: OutputStream) -> None:
        if stream.started == 0.0:  # not when it comes back from a preemption
            stream.started = self._clock()
            self.stats.queue_time.observe(stream.started - stream.arrived)

    def _observe_token(self, request: _Request, now: float) -> None:
        stream, stats = request.stream, self.stats
        stats.generation_tokens += 1
        if stream.first == 0.0:
            stream.first = now
            stats.prompt_tokens += request.sequence.num_prompt
            stats.time_to_first_token.observe(now - stream.arrived)
        else:
            stats.inter_token_latency.observe(now - stream.last)
        stream.last = now

    def _end(self, request: _Request, finish: FinishReason, now: float) -> None:
        # A sink may have aborted its own request from within emit().
        if self._requests.pop(request.sequence.id, None) is None:
            return
        self.stats.finished[finish.value] += 1
        self.stats.request_latency.observe(now - request.stream.arrived)

    def _fail(self, sequences: list[Sequence], kind: type[AsyncLLMError], message: str) -> None:
        """Each request gets an error of its own: raising one adds to its traceback."""
        for seq in sequences:
            request = self._requests.pop(seq.id, None)
            if request is not None:
                self.stats.finished["error"] += 1
                try:
                    request.stream.sink.fail(kind(message))
                except Exception:
                    log.exception("request %d could not be told of its failure", seq.id)

    def _die(self, cause: str) -> None:
        if self._dead is None:
            self._dead = cause
        self._stopped.set()
        self._wake.set()
        for future in self._steps:
            future.add_done_callback(_forget)
        sequences = [request.sequence for request in self._requests.values()]
        for seq in sequences:
            self._scheduler.finish(seq)
        self._fail(sequences, EngineDead, self._dead)
        self._update_gauges()

    def _update_gauges(self) -> None:
        scheduler, stats = self._scheduler, self.stats
        stats.running = len(scheduler.running)
        stats.waiting = len(scheduler.waiting)
        stats.preemptions = scheduler.num_preemptions
        stats.pages_total = scheduler.cache.num_pages
        stats.pages_held = scheduler.cache.num_held
        stats.pages_cached = scheduler.cache.num_cached


def _forget(future: asyncio.Future[bytes]) -> None:
    """Nobody waits for this step any more, whatever became of it."""
    if not future.cancelled():
        future.exception()


def _token_logprob(token: int, entry: RowLogprobs) -> TokenLogprob:
    top = tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return TokenLogprob(token, entry.sampled, top)
