"""What stands in an engine's place when several processes have one each."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.engine.requests.check import check_request, check_ttl
from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.requests.reservations import Reservation, Reservations
from asyncllm.engine.requests.view import LiveView
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest, EngineDead, NotReady, StepError
from asyncllm.llm.replicas.link import pack, unpack_error
from asyncllm.llm.replicas.placed_requests import Request, Requests
from asyncllm.llm.replicas.process import ReplicaProcess
from asyncllm.supervise.front.router import Router, blocks
from asyncllm.types import SamplingParams, SchedulingParams, Sink, TokenDelta
from asyncllm.types.beam_search import Beam, BeamSearchParams

#: A replica's own bounds of its queue: what it is sent was accepted here, where all are counted.
NO_BOUND: Final = 2**31 - 1


class ReplicatedEngine:
    """Places requests on replicas, and moves those of a replica that dies.

    Attributes:
        limits: of one replica, but for the queue, which is that of all.
        stats: of the requests; nothing of steps and pages.
    """

    vitals = None

    def __init__(self, config: EngineConfig):
        self.stats = EngineStats()
        self._bounds = {
            name: getattr(config, name) * config.dp
            for name in ("max_waiting", "max_waiting_tokens")
        }
        config = msgspec.structs.replace(config, **dict.fromkeys(self._bounds, NO_BOUND))
        self._replicas = [
            ReplicaProcess(config, index, self._on_deltas, self._on_lost)
            for index in range(config.dp)
        ]
        self._router = Router(config.dp)
        self._requests = Requests(self.stats)
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
            await self.aclose()
            raise
        self.limits: EngineLimits = msgspec.structs.replace(limits, **self._bounds)
        self._requests.num_slots = limits.max_num_seqs * len(self._replicas)
        self.reservations = Reservations(self._requests, self.limits)

    # -- as an engine ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes requests now; else all are being started again, or dead."""
        return self.alive and any(replica.is_ready for replica in self._replicas)

    async def stopped(self) -> str:
        await self._stopped.wait()
        return self._dead or ""

    def give_up(self, cause: str) -> None:
        self._die(cause)

    async def aclose(self) -> None:
        """End all processes, which happens also if this is cancelled."""
        self._die("engine closed")
        await asyncio.wait([replica.end() for replica in self._replicas])

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
            self._requests.aborted(request)
            self._leave(request)

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        return None

    def view(self, most: int = 64) -> LiveView:
        raise BadRequest("dp: the live view is of one replica", param="dp")

    def search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ) -> ReplicaSearch:
        """In one of the replicas; it is checked when it runs."""

        async def run() -> list[Beam]:
            found: asyncio.Future[list[Beam]] = asyncio.get_running_loop().create_future()
            whole = SamplingParams(
                max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids
            )
            prompt = check_request(prompt_ids, whole, self.limits).prompt
            number = self._add("search", prompt, params, found, scheduling, reservation)
            try:
                return await found
            finally:
                self.abort(number)

        return ReplicaSearch(run)

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        """The replica that gets the request prepares them."""
        return params

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
        packed = pack(prompt, params, scheduling)
        if reservation is not None:
            reservation.take(len(prompt))
        else:
            self.reservations.check(len(prompt), 1, scheduling.tenant)
        self._next_id += 1
        number = self._next_id
        request = Request(number, sink, prompt, scheduling, (kind, number, packed))
        self._place(request, besides=None)
        self._requests.add(request)
        return number

    def _place(self, request: Request, besides: int | None) -> None:
        """
        Raises:
            NotReady: there is no replica now.
        """
        ready = [i for i, r in enumerate(self._replicas) if r.is_ready and i != besides]
        if not ready:
            raise NotReady("all replicas are being started again; try again later")
        data = request.prompt.tobytes()
        request.placed = self._router.place(blocks(data), len(data), ready)
        self._replicas[request.placed.replica].send(*request.message)

    def _on_deltas(self, deltas: list[tuple[int, Any]]) -> None:
        for number, what in deltas:
            request = self._requests.get(number)
            if request is None:
                continue  # aborted
            if isinstance(what, TokenDelta):
                self._requests.answered(request, what)
                if what.finish_reason is not None:
                    self._leave(request)
                if not request.emit(what):
                    self.abort(number)
                    request.fail(StepError("the output could not be delivered"))
            elif isinstance(what, list):
                self._requests.searched(request, what)
                self._leave(request)
                request.found(what)
            else:
                error = unpack_error(what)
                if request.has_begun or not isinstance(error, EngineDead):
                    self._fail(request, error)
                # Else it moves when its replica has ended, which is now.

    def _fail(self, request: Request, error: Exception) -> None:
        self._requests.failed(request, error)
        self._leave(request)
        request.fail(error)

    def _leave(self, request: Request) -> None:
        """Its replica has less to do."""
        if request.placed is not None:
            self._router.ended(request.placed)
            request.placed = None

    def _on_lost(self, index: int, how: str) -> None:
        self._router.forget(index)
        for request in self._requests.all():
            if request.placed is None or request.placed.replica != index:
                continue
            self._leave(request)
            try:
                if request.has_begun or request.has_moved:
                    raise EngineDead(f"replica {index} {how}")
                request.has_moved = True
                self._place(request, besides=index)
            except (EngineDead, NotReady) as error:
                self._fail(request, error)
        if all(replica.is_gone for replica in self._replicas):
            self._die(f"replica {index} {how}")

    def _die(self, cause: str) -> None:
        if self._dead is not None:
            return
        self._dead = cause
        self._stopped.set()
        for request in self._requests.all():
            self._fail(request, EngineDead(cause))


class ReplicaSearch(NamedTuple):
    """A beam search that is still to be run, in one of the replicas."""

    run: Callable[[], Coroutine[Any, Any, list[Beam]]]
