"""The requests that replicas have, as the program that sent them knows them."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncllm.engine.requests.live import SINK_ERRORS
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest, DeadlineExceeded, QueueFull
from asyncllm.supervise.front.router import Placed
from asyncllm.types import SchedulingParams, TokenDelta
from asyncllm.types.beam_search import Beam

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """One that a replica has.

    Attributes:
        sink: a ``Sink``, or the future of a beam search.
        message: what the replica was sent.
        has_begun: its answer has; then it cannot move to another replica.
        num_generated: tokens.
    """

    number: int
    sink: Any
    prompt: array[int]
    scheduling: SchedulingParams
    message: Any
    placed: Placed | None = None
    has_begun: bool = False
    has_moved: bool = False
    num_generated: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    def emit(self, delta: TokenDelta) -> bool:
        """Returns whether it could be delivered: a sink that raises loses its own request only."""
        return self._tell(lambda: self.sink.emit(delta))

    def found(self, beams: list[Beam]) -> None:
        if not self.sink.done():
            self.sink.set_result(beams)

    def fail(self, error: Exception) -> None:
        if not isinstance(self.sink, asyncio.Future):
            self._tell(lambda: self.sink.fail(error))
        elif not self.sink.done():
            self.sink.set_exception(error)

    def _tell(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except SINK_ERRORS:
            log.exception("request %d could not be delivered", self.number)
            return False
        return True


class Requests:
    """All of them, by number; counts them in ``stats``.

    It is also the queue for ``Reservations``: of all replicas, as far as it is known here, where a
    request waits until its first token.

    Attributes:
        num_slots: of all replicas together.
    """

    def __init__(self, stats: EngineStats):
        self.num_slots = 0
        self.num_waiting_tokens = 0
        self._stats = stats
        self._live: dict[int, Request] = {}
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()

    def get(self, number: int) -> Request | None:
        return self._live.get(number)

    def all(self) -> list[Request]:
        return list(self._live.values())

    # -- as a queue ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._live) - self.num_slots)

    @property
    def num_free_slots(self) -> int:
        return max(0, self.num_slots - len(self._live))

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        return self._requests_of[tenant], self._tokens_of[tenant]

    def expected_wait(self) -> float:
        return 1.0

    # -- from its beginning to its end -----------------------------------------------------------

    def add(self, request: Request) -> None:
        self._live[request.number] = request
        self._count(request, 1)
        self._update_gauges()

    def answered(self, request: Request, delta: TokenDelta) -> None:
        """A part of its answer has come, or the last one."""
        self._begin(request)
        request.num_generated += len(delta.token_ids)
        self._stats.generation_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._stats.cached_tokens += delta.cached_tokens
            self._finish(request, delta.finish_reason.value)

    def searched(self, request: Request, beams: list[Beam]) -> None:
        """A beam search has its answer."""
        self._begin(request)
        best = beams[0]
        request.num_generated = sum(len(beam.token_ids) for beam in beams)
        self._stats.generation_tokens += request.num_generated
        self._stats.cached_tokens += best.usage.cached_tokens
        self._finish(request, best.finish_reason.value)

    def aborted(self, request: Request) -> None:
        self._end(request, "abort")

    def failed(self, request: Request, error: Exception) -> None:
        """It ends with an error, which is counted unless it says that it was not accepted."""
        if isinstance(error, (BadRequest, QueueFull)):
            self._end(request, None)
        else:
            self._end(request, "deadline" if isinstance(error, DeadlineExceeded) else "error")

    def _begin(self, request: Request) -> None:
        if request.has_begun:
            return
        request.has_begun = True
        self._count(request, -1)
        self._stats.prompt_tokens += len(request.prompt)
        self._stats.time_to_first_token.observe(time.perf_counter() - request.arrived)

    def _finish(self, request: Request, how: str) -> None:
        self._end(request, how)
        self._stats.request_latency.observe(time.perf_counter() - request.arrived)

    def _end(self, request: Request, how: str | None) -> None:
        del self._live[request.number]
        if not request.has_begun:
            self._count(request, -1)
        if how is not None:
            self._stats.finished[how] += 1
            tenant, num_prompt = request.scheduling.tenant, len(request.prompt)
            self._stats.tenants.ended(tenant, num_prompt, request.num_generated)
        self._update_gauges()

    def _count(self, request: Request, number: int) -> None:
        """It waits (1), or does so no more (-1)."""
        tokens, tenant = number * len(request.prompt), request.scheduling.tenant
        self.num_waiting_tokens += tokens
        if not tenant:
            return
        self._requests_of[tenant] += number
        self._tokens_of[tenant] += tokens
        if not self._requests_of[tenant]:
            del self._requests_of[tenant], self._tokens_of[tenant]

    def _update_gauges(self) -> None:
        self._stats.waiting = self.num_waiting
        self._stats.running = len(self._live) - self._stats.waiting
