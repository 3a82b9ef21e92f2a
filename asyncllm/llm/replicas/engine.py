"""What stands in an engine's place when several processes have one each."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.engine.requests.check import check_request, check_ttl
from asyncllm.engine.requests.reservations import Reservations
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest, EngineDead, NotReady
from asyncllm.front.blocks import blocks
from asyncllm.front.router import Router
from asyncllm.llm.replicas.link import unpack_error
from asyncllm.llm.replicas.process import ReplicaProcess
from asyncllm.types import SchedulingParams, TokenDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.config import EngineConfig, EngineLimits
    from asyncllm.engine.requests.history import RequestTrace
    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.engine.requests.view import LiveView
    from asyncllm.front.router import Placed
    from asyncllm.types import SamplingParams, Sink
    from asyncllm.types.beam_search import Beam, BeamSearchParams


class _Request:
    """One that a replica has."""

    __slots__ = ("has_begun", "has_moved", "message", "placed", "prompt", "scheduling", "sink")

    def __init__(self, sink: Any, prompt: array[int], scheduling: SchedulingParams, message: Any):
        self.sink = sink
        self.prompt = prompt
        self.scheduling = scheduling
        self.message = message
        self.placed: Placed | None = None
        self.has_begun = False
        self.has_moved = False


class _Waiting:
    """The queues of all replicas, as far as it is known here: requests without a first token."""

    def __init__(self, num_slots: int):
        self.num_waiting_tokens = 0
        self.num_live = 0
        self._num_slots = num_slots
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_live - self._num_slots)

    @property
    def num_free_slots(self) -> int:
        return max(0, self._num_slots - self.num_live)

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        return self._requests[tenant], self._tokens[tenant]

    def expected_wait(self) -> float:
        return 1.0

    def count(self, request: _Request, number: int) -> None:
        """A request has come (1), or is not waiting any more (-1)."""
        tokens, tenant = number * len(request.prompt), request.scheduling.tenant
        self.num_waiting_tokens += tokens
        if tenant:
            self._requests[tenant] += number
            self._tokens[tenant] += tokens


class ReplicatedEngine:
    """Places requests on replicas, and moves those of a replica that dies.

    Attributes:
        limits: of one replica, but for the queue, which is that of all.
        stats: of the requests; nothing of steps and pages.
    """

    vitals = None

    def __init__(self, config: EngineConfig):
        self.stats = EngineStats()
        self._replicas = [
            ReplicaProcess(config, index, self._on_deltas, self._on_lost)
            for index in range(config.dp)
        ]
        self._router = Router(config.dp)
        self._requests: dict[int, _Request] = {}
        self._next_id = 0
        self._dead: str | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Load the model in all processes.

        Raises:
            AsyncLLMError: one of them cannot; the others are ended.
        """
        starting = [asyncio.ensure_future(replica.start()) for replica in self._replicas]
        try:
            limits, *_ = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            await self.close()
            raise
        count = len(self._replicas)
        self.limits: EngineLimits = msgspec.structs.replace(
            limits,
            max_waiting=limits.max_waiting * count,
            max_waiting_tokens=limits.max_waiting_tokens * count,
        )
        self._waiting = _Waiting(limits.max_num_seqs * count)
        self.reservations = Reservations(self._waiting, self.limits)

    # -- as an engine ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def now(self) -> float:
        return time.perf_counter()

    async def stopped(self) -> str:
        await self._stopped.wait()
        return self._dead or ""

    def give_up(self, cause: str) -> None:
        self._die(cause)

    async def aclose(self) -> None:
        self._die("engine closed")

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def abandon(self) -> None:
        for replica in self._replicas:
            replica.abandon()

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        *,
        reservation: Reservation | None = None,
    ) -> int:
        """As ``Engine.add``; what only a replica can check fails through the sink."""
        plain = msgspec.structs.replace(
            params, logit_bias=None, allowed_token_ids=None, bad_words=(), grammar=None
        )
        plain = msgspec.structs.replace(plain, reasoning=None)
        prompt = check_request(prompt_ids, plain, self.limits).prompt
        return self._add("add", prompt, params, sink, scheduling, reservation)

    def abort(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            assert request.placed is not None
            self._replicas[request.placed.replica].send("abort", request_id)
            self._ended(request_id, request)

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        return None

    def view(self, most: int = 64) -> LiveView:
        raise BadRequest("dp: the live view is of one replica", param="dp")

    async def search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ) -> list[Beam]:
        """A beam search in one of the replicas."""
        found: asyncio.Future[list[Beam]] = asyncio.get_running_loop().create_future()
        prompt = array("i", prompt_ids)
        number = self._add("search", prompt, params, found, scheduling, reservation)
        try:
            return await found
        finally:
            self.abort(number)

    # -- requests --------------------------------------------------------------------------------

    def _add(
        self,
        kind: str,
        prompt: array[int],
        params: Any,
        sink: Any,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ) -> int:
        if self._dead is not None:
            raise EngineDead(self._dead)
        scheduling = scheduling or SchedulingParams()
        check_ttl(scheduling, self.limits)
        if reservation is not None:
            reservation.take(len(prompt))
        else:
            self.reservations.check(len(prompt), 1, scheduling.tenant)
        self._next_id += 1
        number = self._next_id
        message = (kind, number, prompt, params, scheduling)
        request = _Request(sink, prompt, scheduling, message)
        self._place(request, besides=None)
        self._requests[number] = request
        self._waiting.num_live += 1
        self._waiting.count(request, 1)
        self._update_gauges()
        return number

    def _place(self, request: _Request, besides: int | None) -> None:
        """
        Raises:
            NotReady: there is no replica now.
        """
        ready = [i for i, r in enumerate(self._replicas) if r.is_ready and i != besides]
        if not ready:
            raise NotReady("all replicas are being started again")
        data = request.prompt.tobytes()
        request.placed = self._router.place(blocks(data), len(data), ready)
        self._replicas[request.placed.replica].send(*request.message)

    def _on_deltas(self, deltas: list[tuple[int, Any]]) -> None:
        for number, what in deltas:
            request = self._requests.get(number)
            if request is None:
                continue  # aborted
            self._begun(request)
            if isinstance(what, TokenDelta):
                self.stats.generation_tokens += len(what.token_ids)
                if what.finish_reason is not None:
                    self.stats.finished[what.finish_reason.value] += 1
                    self.stats.cached_tokens += what.cached_tokens
                    self._ended(number, request)
                request.sink.emit(what)
                continue
            self._ended(number, request)
            if isinstance(what, list):
                if not request.sink.done():
                    request.sink.set_result(what)
            else:
                _fail(request.sink, unpack_error(what))

    def _begun(self, request: _Request) -> None:
        if not request.has_begun:
            request.has_begun = True
            self.stats.prompt_tokens += len(request.prompt)
            self._waiting.count(request, -1)

    def _ended(self, number: int, request: _Request) -> None:
        del self._requests[number]
        self._begun(request)
        self._waiting.num_live -= 1
        self._update_gauges()
        if request.placed is not None:
            self._router.ended(request.placed)

    def _update_gauges(self) -> None:
        self.stats.waiting = self._waiting.num_waiting
        self.stats.running = self._waiting.num_live - self.stats.waiting

    def _on_lost(self, index: int, how: str) -> None:
        self._router.forget(index)
        for number, request in list(self._requests.items()):
            placed = request.placed
            if placed is None or placed.replica != index:
                continue
            try:
                if request.has_begun or request.has_moved:
                    raise EngineDead(f"replica {index} {how}")
                self._router.ended(placed)
                request.placed = None
                request.has_moved = True
                self._place(request, besides=index)
            except (EngineDead, NotReady) as error:
                self._ended(number, request)
                _fail(request.sink, error)
        if not any(replica.may_return for replica in self._replicas):
            self._die(f"replica {index} {how}")

    def _die(self, cause: str) -> None:
        if self._dead is not None:
            return
        self._dead = cause
        self._stopped.set()
        for number, request in list(self._requests.items()):
            self._ended(number, request)
            _fail(request.sink, EngineDead(cause))


class ReplicaSearch:
    """A beam search that was accepted and is still to be run, in one of the replicas."""

    def __init__(
        self,
        engine: ReplicatedEngine,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ):
        self._engine = engine
        self._arguments = (prompt_ids, params, scheduling, reservation)

    async def run(self) -> list[Beam]:
        """Raises like ``AsyncLLM.beam_search``."""
        return await self._engine.search(*self._arguments)


def _fail(sink: Any, error: Exception) -> None:
    if not isinstance(sink, asyncio.Future):
        sink.fail(error)
    elif not sink.done():
        sink.set_exception(error)
