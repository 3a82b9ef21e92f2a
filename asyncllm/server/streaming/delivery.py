"""The sequences of one HTTP request: submitted together, and aborted when the request ends."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiohttp import HttpVersion11, web

from asyncllm.server.http.half_close import PROBE, look_closer, send_continue
from asyncllm.server.http.middleware import request_id
from asyncllm.server.observe.entry import current_entry
from asyncllm.server.request_log import Served
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.model import Model
    from asyncllm.server.trace import Trace

log = logging.getLogger(__name__)

#: How often, in seconds, all clients are looked at; a step looks at those that it delivers to.
SWEEP_SECONDS: Final = 0.1
#: Aborted requests are logged together, this long after the first of them at the latest.
ABORT_SECONDS: Final = 1.0
#: More of them are one line.
MOST_LINES: Final = 3
#: With logprobs of more prompt tokens than this, the answer is encoded in a thread.
LONG_PROMPT: Final = 512


class Job(NamedTuple):
    """One sequence to submit."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    scheduling: SchedulingParams


class Reply(Protocol):
    """Builds the answer to one request in a route's format, and counts its tokens.

    Attributes:
        id: of the answer; empty where answers have no id.
        content_type: of a streamed answer.
        explain: makes the trace at the end of the answer; None for no trace. It is set before
            anything is delivered, and called when every sequence has ended.
    """

    id: str
    content_type: str
    explain: Callable[[], Trace] | None

    def opening(self) -> bytes:
        """Frames to send once the engine has accepted the request."""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        """Frames for a delta of one choice; may be empty."""

    def closing(self) -> bytes:
        """Frames after the last choice has ended."""

    def failure(self, error: Exception) -> bytes:
        """Frames that end an answer that failed."""

    def lost(self, error: Exception) -> bytes:
        """The same for a process that dies: made before the answer, and nothing changes by it."""

    def body(self, outputs: list[TokenDelta]) -> bytes:
        """The whole answer of a request that does not stream."""


class Delivery(ABC):
    """Takes the deltas of one request's sequences; a future is set when nothing more is coming.

    Attributes:
        error: why the client does not get the whole answer.
        num_generated: tokens so far, of all sequences.
    """

    def __init__(self, count: int):
        self.error: Exception | None = None
        self.num_generated = 0
        self._unfinished = set(range(count))
        self._ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:  # noqa: B027  # not every delivery has a client that may have left
        """Called before the sequences are submitted.

        Raises:
            ConnectionResetError: the client is gone already.
        """

    def push(self, index: int, delta: TokenDelta) -> None:
        """Take a step's delta of one sequence; must not raise."""
        if index not in self._unfinished:
            return  # aborted here, and not yet in the engine
        self.num_generated += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
        self._take(index, delta)

    @abstractmethod
    def _take(self, index: int, delta: TokenDelta) -> None:
        """Take a delta of a sequence that has not ended before."""

    def abort(self) -> None:
        """End all running sequences; the client gets the answer so far."""
        for index in sorted(self._unfinished):
            self.push(index, TokenDelta(finish_reason=FinishReason.ABORT))

    def end(self, error: Exception | None = None) -> None:
        """Set the future; its waiter aborts what still runs. Idempotent."""
        self.error = self.error or error
        if not self._ended.done():
            self._ended.set_result(error)

    @abstractmethod
    def look(self, now: float) -> None:
        """Called every SWEEP_SECONDS; ``now`` is ``loop.time()``."""


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
        """Answer the request; raises errors that come before the first byte."""

    def begin(self) -> None:
        self._request[PROBE] = self.probe
        look_closer(self._request)
        if self._transport.is_closing():
            raise ConnectionResetError("client disconnected")

    def probe(self) -> bool:
        """Write something harmless, which a client that is gone resets; False if it cannot yet."""
        if self._ended.done():
            return False  # the answer itself is written next
        if self._request.version < HttpVersion11:
            self._transport.abort()
            return True
        return send_continue(self._request)

    def look(self, now: float) -> None:
        self._client_is_gone()

    def _client_is_gone(self) -> bool:
        """Whether the client has disconnected; if so, the request ends."""
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
    """The answer to a request that does not stream."""

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
        if scored > LONG_PROMPT and self._reply.explain is None:  # traces belong to the loop
            body = await asyncio.to_thread(self._reply.body, self._outputs)
        else:
            body = self._reply.body(self._outputs)
        return web.Response(body=body, content_type="application/json")


class AbortLog:
    """Logs requests that were aborted: a few one by one, those of a stopped load in one line."""

    def __init__(self) -> None:
        #: The cause of each, and the context that names its request.
        self._found: list[tuple[str, Context]] = []

    def add(self, cause: str) -> None:
        """Note the current request; it is logged within ``ABORT_SECONDS``."""
        if not self._found:
            asyncio.get_running_loop().call_later(ABORT_SECONDS, self.flush, context=Context())
        self._found.append((cause, copy_context()))

    def flush(self) -> None:
        found, self._found = self._found, []
        if len(found) <= MOST_LINES:
            for cause, context in found:
                context.run(log.info, "request %s aborted: %s", context[request_id], cause)
            return
        causes = Counter(cause for cause, _ in found).most_common()
        counted = ", ".join(f"{cause} ({count:,})" for cause, count in causes)
        Context().run(log.info, "%d requests aborted: %s", len(found), counted)


class LiveRequests:
    """The requests being served now.

    It looks for clients that disconnect while no step delivers to them (a queued request, a long
    prefill). aiohttp cancels their handlers only if its runner is set up so, which a host
    application's need not be.
    """

    def __init__(self, on_end: Callable[[Served], None]) -> None:
        """``on_end``: called with each request that has ended."""
        self._on_end = on_end
        self._deliveries: dict[Served, Delivery] = {}
        self._aborts = AbortLog()
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
        """Submit the jobs; leaving the context aborts those that still run.

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
            entry.submitted(ids, jobs[0].params if jobs else None)
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
            self._aborts.add(str(delivery.error or error) or "cancelled")
            raise
        finally:
            for engine_id in ids:
                llm.abort(engine_id)
            self._remove(served)

    def abort(self, served: Served) -> bool:
        """End all sequences of a request; returns False if it has ended already."""
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
        self._on_end(served)
        if not self._deliveries:
            self._aborts.flush()
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
