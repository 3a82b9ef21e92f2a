"""The live requests: what is delivered to each, what is counted, and how each ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from asyncllm.engine.requests.history import History, RequestTrace
from asyncllm.engine.requests.request import Request
from asyncllm.engine.requests.view import LiveView, live_view
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step import Emitted
from asyncllm.engine.stats import EngineStats, Histogram
from asyncllm.errors import AsyncLLMError, ConstraintError, EngineDead, StepError
from asyncllm.types import FinishReason, TokenLogprob
from asyncllm.wire.messages import BAD_TOKEN, PooledPrompt, RowLogprobs, ScoredPrompt, StepResult


class Cancels:
    """Aborted sequences until they have given up everything; times by the engine's clock.

    A step in flight may have a row of a sequence, which then keeps its slot and its pages until
    that step has ended.
    """

    def __init__(self, seconds: Histogram):
        """
        Args:
            seconds: observes the time from each abort to the end of its use.
        """
        self._seconds = seconds
        self._waiting: list[tuple[Sequence, float]] = []

    def add(self, seq: Sequence, now: float) -> None:
        """``seq`` was aborted, and the scheduler has ended it."""
        self._waiting.append((seq, now))
        self.step_ended(now)

    def step_ended(self, now: float) -> None:
        """A step may have ended: observe the sequences that gave up their slot and pages."""
        if not self._waiting:
            return
        still = []
        for seq, since in self._waiting:
            if seq.slot < 0 and seq.kv.node is None:
                self._seconds.observe(now - since)
            else:
                still.append((seq, since))
        self._waiting = still


log = logging.getLogger(__name__)

#: What a sink may raise and only its own request fails: also what asking a cancelled task raises.
SINK_ERRORS: Final = (Exception, asyncio.CancelledError)


class Requests:
    """Owns every request from its acceptance to its end.

    The scheduler is told of requests that end before it says so (stop string, abort, failure).

    Attributes:
        cancels: aborted requests that may still use a slot and pages.
    """

    def __init__(
        self, scheduler: Scheduler, stats: EngineStats, history: History, clock: Callable[[], float]
    ):
        self._scheduler = scheduler
        self._stats = stats
        self._history = history
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self.cancels = Cancels(stats.cancel_to_free)

    def add(self, request: Request) -> None:
        """A request was accepted."""
        self._requests[request.sequence.id] = request

    def sequences(self, *ids: int) -> list[Sequence]:
        """Of the requests with these ids that live."""
        return [self._requests[id].sequence for id in ids if id in self._requests]

    def trace(self, request_id: int, *, steps: bool) -> RequestTrace | None:
        """What happened to a request; None when it is unknown or forgotten."""
        request = self._requests.get(request_id)
        if request is None:
            return self._history.trace(request_id, steps=steps)
        return self._history.live_trace(request.sequence, request.stream, steps=steps)

    def live_traces(self, most: int) -> list[RequestTrace]:
        """Of the oldest requests that have not ended, without their steps."""
        requests = list(self._requests.values())[:most]  # an atomic copy: another thread may ask
        live_trace = self._history.live_trace
        return [live_trace(each.sequence, each.stream, steps=False) for each in requests]

    def view(self, most: int) -> LiveView:
        """What runs, waits and has ended; at most about ``most`` of each, see ``LiveView``."""
        requests = self._requests.values()
        return live_view(requests, self._scheduler, self._history, self._clock(), most)

    # -- delivery --------------------------------------------------------------------------------

    def started(self, admitted: Iterable[Sequence], now: float) -> None:
        """These sequences were admitted, for the first time or again."""
        for seq in admitted:
            request = self._requests[seq.id]
            stream = request.stream
            if stream.started == 0.0:  # not after a preemption
                stream.started = now
                stream.cached_tokens = seq.num_cached
                if not request.is_part:
                    self._stats.admitted_tokens += seq.num_prompt
                    self._stats.cached_tokens += stream.cached_tokens
                    self._stats.host_cached_tokens += min(
                        seq.timeline.pages_loaded * self._scheduler.cache.page_size,
                        stream.cached_tokens,
                    )
                    self._stats.queue_time.observe(now - stream.arrived)

    def deliver(self, emitted: list[Emitted], result: StepResult) -> None:
        """Hand a step's tokens, or failures, to the sinks."""
        now, stats, requests = self._clock(), self._stats, self._requests
        by_row = {entry.row: entry for entry in result.logprobs}
        for seq, row, token, finish in emitted:
            request = requests.get(seq.id)
            if request is None:
                continue  # aborted while the token was in flight
            if token < 0:
                self._end_without_token(request, token, finish, dict(result.failures).get(row), now)
                continue
            entry = by_row.get(row) if by_row else None
            logprob = None if entry is None else _token_logprob(token, entry)
            stream = request.stream
            try:
                finish = stream.push(token, finish, logprob)
            except SINK_ERRORS as error:
                self._fail_delivery(seq, error)
                continue
            stats.generation_tokens += 1
            if stream.first == 0.0:
                self._count_first_token(request, now)
            if finish is not None:
                self._scheduler.finish(seq, now)
                self._end(request, finish, now)

    def deliver_prompts(self, parts: list[tuple[Sequence, ScoredPrompt | PooledPrompt]]) -> None:
        """Keep parts of prompts' logprobs or hidden states, and deliver those that are complete."""
        for seq, part in parts:
            request = self._requests.get(seq.id)
            reader = None if request is None else request.reader
            if request is None or reader is None or not reader.add(part):
                continue
            request.reader = None
            try:
                request.stream.sink.emit(reader.delta())
            except SINK_ERRORS as error:
                self._fail_delivery(seq, error)

    def _end_without_token(
        self,
        request: Request,
        token: int,
        finish: FinishReason | None,
        failure: str | None,
        now: float,
    ) -> None:
        """The sequence failed (``failure``: of its constraints), or was to generate nothing."""
        seq = request.sequence
        if failure is not None:
            self.fail([seq], ConstraintError, failure, "constraint")
        elif token == BAD_TOKEN or finish is None:
            log.error(
                "request %d failed: logits that are not finite at position %d",
                seq.id,
                len(seq.tokens),
            )
            self.fail([seq], StepError, "the model's logits were not finite", "logits")
        else:
            self._stats.prompt_tokens += seq.num_prompt
            try:
                request.stream.end(finish)
            except SINK_ERRORS as error:
                self._fail_delivery(seq, error)
            else:
                self._end(request, finish, now)

    def _fail_delivery(self, seq: Sequence, error: BaseException) -> None:
        """A sink that raises loses its own request only."""
        log.error("request %d could not be delivered", seq.id, exc_info=error)
        self.drop([seq], StepError, "the output could not be delivered", "delivery")

    def _count_first_token(self, request: Request, now: float) -> None:
        request.stream.first = now
        if not request.is_part:
            self._stats.prompt_tokens += request.sequence.num_prompt
            self._stats.time_to_first_token.observe(now - request.stream.arrived)

    # -- ends ------------------------------------------------------------------------------------

    def abort(self, request_id: int) -> bool:
        """Drop a request; returns whether it lived."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        now = self._clock()
        self._scheduler.finish(request.sequence, now)
        self.cancels.add(request.sequence, now)
        self._close(request, FinishReason.ABORT.value, now)
        return True

    def fail_all(self, message: str) -> None:
        """The engine is dead: fail all requests, without the scheduler, which may be broken.

        Sinks come first: nobody is left waiting, whatever else goes wrong here.
        """
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            _tell(request, EngineDead(message))
        for request in requests:
            self._stats.errors["engine"] += not request.is_part
            self._close(request, "error", self._clock())

    def drop(
        self, sequences: list[Sequence], kind: type[AsyncLLMError], message: str, cause: str
    ) -> None:
        """Fail requests that the scheduler still has; see ``fail``."""
        for seq in sequences:
            self._scheduler.finish(seq, self._clock())
        self.fail(sequences, kind, message, cause)

    def fail(
        self, sequences: list[Sequence], kind: type[AsyncLLMError], message: str, cause: str
    ) -> None:
        """End requests, each with its own error object, as raising one adds to its traceback.

        Args:
            cause: one of ``stats.ERROR_CAUSES``, or "deadline".
        """
        how = "deadline" if cause == "deadline" else "error"
        for seq in sequences:
            request = self._requests.pop(seq.id, None)
            if request is not None:
                if how == "error" and not request.is_part:
                    self._stats.errors[cause] += 1
                self._close(request, how, self._clock())
                _tell(request, kind(message))

    def _end(self, request: Request, finish: FinishReason, now: float) -> None:
        # A sink may have aborted its own request from within emit().
        if self._requests.pop(request.sequence.id, None) is None:
            return
        self._close(request, finish.value, now)
        if not request.is_part:
            self._stats.request_latency.observe(now - request.stream.arrived)

    def _close(self, request: Request, how: str, now: float) -> None:
        """The last thing that happens to every request."""
        if request.expiry is not None:
            request.expiry.cancel()
        if not request.is_part:
            self._stats.finished[how] += 1
            seq = request.sequence
            self._stats.tenants.ended(seq.service.tenant, seq.num_prompt, seq.num_output)
            self._history.ended(request.sequence, request.stream, how, now)


def _tell(request: Request, error: AsyncLLMError) -> None:
    try:
        request.stream.sink.fail(error)
    except SINK_ERRORS:
        log.exception("request %d could not be told of its failure", request.sequence.id)


def _token_logprob(token: int, entry: RowLogprobs) -> TokenLogprob:
    top = tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return TokenLogprob(token, entry.sampled, top)
