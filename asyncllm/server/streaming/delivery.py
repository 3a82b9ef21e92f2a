"""The sequences of one HTTP request: submitted together, ended together, never left behind."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aiohttp import HttpVersion11, web

from asyncllm.server.http.access_log import current_entry
from asyncllm.server.http.half_close import PROBE, look_closer, send_continue
from asyncllm.server.http.middleware import request_id
from asyncllm.server.request_log import Served
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.model import Model
    from asyncllm.server.trace import Trace

log = logging.getLogger(__name__)

#: How often clients are looked after, in seconds. Between steps only: a step looks by itself.
SWEEP_SECONDS = 0.1
#: Logprobs of so many prompt tokens are written in a thread, for all others to go on meanwhile.
LONG_PROMPT = 512


class Job(NamedTuple):
    """One sequence to submit."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    scheduling: SchedulingParams


class Reply(Protocol):
    """What a route answers with; one object per request, which also counts tokens for ``usage``.

    Attributes:
        id: what the answer calls itself; empty where answers have no id.
        content_type: of a streamed answer.
        explain: makes the trace that the answer is to end with; None for none. It is set before
            anything is delivered, and called when every sequence has ended.
    """

    id: str
    content_type: str
    explain: Callable[[], Trace] | None

    def opening(self) -> bytes:
        """Frames to send as soon as the engine has accepted the request."""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        """Frames for what was added to one choice; may be empty."""

    def closing(self) -> bytes:
        """Frames after the last choice ended, up to the very last."""

    def failure(self, error: Exception) -> bytes:
        """Frames that end an answer which cannot go on."""

    def body(self, outputs: list[TokenDelta]) -> bytes:
        """The whole answer of a request that does not stream."""


class Delivery(ABC):
    """Where the sequences of one request deliver to, and how who waits learns of their end.

    Attributes:
        error: why the client does not get the whole answer.
    """

    def __init__(self, count: int):
        self.error: Exception | None = None
        self._unfinished = set(range(count))
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:  # noqa: B027  # not every delivery has a client that may have left
        """Called before the sequences are submitted.

        Raises:
            ConnectionResetError: the client is gone already.
        """

    def push(self, index: int, delta: TokenDelta) -> None:
        """Take what one step added to one sequence; must not raise."""
        if index not in self._unfinished:
            return  # aborted, and the engine has not heard of it yet
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
        self._take(index, delta)

    @abstractmethod
    def _take(self, index: int, delta: TokenDelta) -> None:
        """A delta of a sequence that had not ended before it."""

    def abort(self) -> None:
        """End all that runs; the client gets what there is so far."""
        for index in sorted(self._unfinished):
            self.push(index, TokenDelta(finish_reason=FinishReason.ABORT))

    def end(self, error: Exception | None = None) -> None:
        """Nothing more is coming; idempotent. Who waits wakes up and aborts what still runs."""
        self.error = self.error or error
        if not self._ended.done():
            self._ended.set_result(error)

    @abstractmethod
    def look(self, now: float) -> None:
        """Called now and then, in ``loop.time()`` seconds, whether or not a step delivers."""


class ClientDelivery(Delivery):
    """To the client that waits for the answer."""

    def __init__(self, request: web.Request, count: int):
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("client disconnected")
        super().__init__(count)
        self._request = request
        self._transport = transport

    @abstractmethod
    async def respond(self) -> web.StreamResponse:
        """Answer the request; raises what went wrong before the first byte."""

    def begin(self) -> None:
        self._request[PROBE] = self.probe
        look_closer(self._request)
        if self._transport.is_closing():
            raise ConnectionResetError("client disconnected")

    def probe(self) -> bool:
        """Write something harmless, for a client that is gone to be found out.

        False when that is not possible yet.
        """
        if self._ended.done():
            return False  # the answer itself is written next
        if self._request.version < HttpVersion11:
            self._transport.abort()
            return True
        return send_continue(self._request)

    def look(self, now: float) -> None:
        self._client_is_gone()

    def _client_is_gone(self) -> bool:
        """Whether the client has disconnected, which also ends the request."""
        gone = self._transport.is_closing()
        if gone:
            self.end(ConnectionResetError("client disconnected"))
        return gone


class ChoiceSink:
    """The Sink of one sequence."""

    __slots__ = ("emit", "fail")

    def __init__(self, delivery: Delivery, index: int):
        self.emit = partial(delivery.push, index)
        self.fail = delivery.end


class WholeAnswer(ClientDelivery):
    """Collects everything, for a request that does not stream."""

    def __init__(self, request: web.Request, reply: Reply, count: int):
        super().__init__(request, count)
        self._reply = reply
        self._outputs = [TokenDelta() for _ in range(count)]

    def _take(self, index: int, delta: TokenDelta) -> None:
        self._outputs[index].merge(delta)
        if not self._unfinished:
            self.end()
        else:
            self._client_is_gone()

    async def respond(self) -> web.StreamResponse:
        error = await self._ended
        if error is not None:
            raise error
        scored = sum(len(output.prompt_logprobs or ()) for output in self._outputs)
        if scored > LONG_PROMPT and self._reply.explain is None:  # a trace is the engine's own
            body = await asyncio.to_thread(self._reply.body, self._outputs)
        else:
            body = self._reply.body(self._outputs)
        return web.Response(body=body, content_type="application/json")


class LiveRequests:
    """The requests being served now.

    It looks after clients that went away while no step delivers to them (a queued request, a long
    prefill), because aiohttp tells handlers only when its runner was set up to, which a host
    application's need not be.
    """

    def __init__(self) -> None:
        self._deliveries: dict[Served, Delivery] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._deliveries)

    @contextmanager
    def serve(
        self,
        llm: Model,
        delivery: Delivery,
        jobs: Sequence[Job],
        reservation: Reservation | None = None,
    ) -> Iterator[Served]:
        """Submit the jobs; on the way out nothing of them is left in the engine.

        Args:
            reservation: has a place for each job.

        Raises:
            BadRequest, QueueFull, DeadlineExceeded, EngineDead: one job was refused; the others
                are taken back.
        """
        ids: list[int] = []
        served = Served(ids)
        self._add(served, delivery)
        if (entry := current_entry()) is not None:
            entry.submitted(ids)
        try:
            delivery.begin()
            for index, job in enumerate(jobs):
                sink = ChoiceSink(delivery, index)
                engine_id = llm.submit(
                    job.prompt_ids, job.params, sink, job.scheduling, reservation
                )
                ids.append(engine_id)
            yield served
        except (asyncio.CancelledError, ConnectionError) as error:
            cause = delivery.error or error
            log.info("request %s aborted: %s", request_id.get(), str(cause) or "cancelled")
            raise
        finally:
            for engine_id in ids:
                llm.abort(engine_id)
            self._remove(served)

    def abort(self, served: Served) -> bool:
        """End a request with all of its sequences, if it has not ended yet; whether it had not."""
        delivery = self._deliveries.get(served)
        if delivery is not None:
            delivery.abort()
        return delivery is not None

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def end_all(self, error: Exception) -> None:
        for delivery in self._deliveries.values():
            delivery.end(error)

    def _add(self, served: Served, delivery: Delivery) -> None:
        self._deliveries[served] = delivery
        self._empty.clear()
        if self._timer is None:
            self._arm()

    def _remove(self, served: Served) -> None:
        del self._deliveries[served]
        if not self._deliveries:
            self._empty.set()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for delivery in self._deliveries.values():
            delivery.look(now)
        if self._deliveries:
            self._arm()
        else:
            self._timer = None
