"""Deliveries: what the sequences of one HTTP request yield, on its way to the client."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, cast, overload

from aiohttp import HttpVersion11, web

from asyncllm.server.http.answer import json_body
from asyncllm.server.http.half_close import PROBE, check_half_closed, send_continue
from asyncllm.server.trace import Trace
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenDelta, TokenLogprob

#: An answer of more bytes is written in a thread: that takes longer than 5 ms.
LARGE_ANSWER: Final = 200_000
#: What is done for each delta, and for each logprob, takes as long as about so many bytes.
DELTA_BYTES: Final = 400
LOGPROB_BYTES: Final = 120
#: So does each byte of a hidden state, whose numbers become text.
HIDDEN_SHARE: Final = 3


class Job(NamedTuple):
    """One sequence to submit."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    scheduling: SchedulingParams


class WholeReply(Protocol):
    """Builds the answer to one request that does not stream, in a route's format.

    Attributes:
        explain: makes the trace at the end of the answer; None for no trace. It is set before
            anything is delivered, and called when every sequence has ended.
    """

    explain: Callable[[], Trace] | None

    def body(self, outputs: list[TokenDelta]) -> bytes:
        """The whole answer; it may raise what the request is refused with."""


class Reply(WholeReply, Protocol):
    """Builds the answer to one request, which may stream, and counts its tokens.

    Attributes:
        id: of the answer; empty where answers have no id.
        content_type: of a streamed answer.
    """

    id: str
    content_type: str

    def opening(self) -> bytes:
        """Frames to send once the engine has accepted the request."""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        """Frames for a delta of one choice; may be empty."""

    def closing(self) -> bytes:
        """Frames after the last choice has ended."""

    def failure(self, error: Exception) -> bytes:
        """Frames that end an answer that failed."""

    def lost(self, error: Exception) -> bytes:
        """Frames that end the answer if the process dies: made before it begins, without effect."""


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
    def check_client(self, now: float) -> None:
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
        check_half_closed(self._request)
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

    def check_client(self, now: float) -> None:
        self._client_is_gone()

    def _client_is_gone(self) -> bool:
        """Whether the client has disconnected; if so, the request ends."""
        gone = self._transport.is_closing()
        if gone:
            self.end(ConnectionResetError("client disconnected"))
        return gone


def size_of(delta: TokenDelta) -> int:
    """About the bytes that the content of a delta takes in memory."""
    size = len(delta.text)
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries and (last := entries[-1]) is not None:
            size += len(entries) * (1 + len(last.top)) * LOGPROB_BYTES
    if delta.hidden is not None:
        size += HIDDEN_SHARE * len(delta.hidden)
    return size


def make_trace(reply: WholeReply) -> None:
    """Make the trace now, if there is one: traces belong to the loop, and a thread goes on."""
    if reply.explain is not None:
        trace = reply.explain()
        reply.explain = lambda: trace


class PackedLogprobs(Sequence[TokenLogprob]):
    """Logprobs of one sequence, in a tenth of the memory that objects take.

    Entries are made when they are read.
    """

    def __init__(self) -> None:
        self._ids, self._logprobs = array("i"), array("d")  # each token's own, then its top
        self._ends = array("q")

    def extend(self, entries: Iterable[TokenLogprob]) -> None:
        for entry in entries:
            self._ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            if entry.top:
                ids, logprobs = zip(*entry.top, strict=True)
                self._ids.extend(ids)
                self._logprobs.extend(logprobs)
            self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        begin, end = self._ends[position - 1] if position else 0, self._ends[position]
        first, *ids = self._ids[begin:end].tolist()
        logprob, *logprobs = self._logprobs[begin:end].tolist()
        return TokenLogprob(first, logprob, tuple(zip(ids, logprobs, strict=True)))


class WholeAnswer(ClientDelivery):
    """The answer to a request that does not stream."""

    def __init__(self, request: web.Request, reply: WholeReply, count: int):
        super().__init__(request, count)
        self._reply = reply
        self._outputs = [TokenDelta() for _ in range(count)]
        self._logprobs: dict[int, PackedLogprobs] = {}

    def _take(self, index: int, delta: TokenDelta) -> None:
        if delta.logprobs is not None:
            self._logprobs.setdefault(index, PackedLogprobs()).extend(delta.logprobs)
            delta.logprobs = None
        self._outputs[index].merge(delta)
        if not self._unfinished:
            self.end()
        else:
            self._client_is_gone()

    async def respond(self) -> web.StreamResponse:
        error = await self._ended
        if error is not None:
            raise error
        for index, logprobs in self._logprobs.items():
            self._outputs[index].logprobs = cast(list[TokenLogprob], logprobs)
        if sum(map(size_of, self._outputs)) + DELTA_BYTES * len(self._outputs) > LARGE_ANSWER:
            make_trace(self._reply)
            return json_body(await asyncio.to_thread(self._reply.body, self._outputs))
        return json_body(self._reply.body(self._outputs))
