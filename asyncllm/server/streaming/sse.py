"""Streamed answers. The engine's delivery writes them, so no task wakes up for a token."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import HttpVersion11, web

from asyncllm.server.arrivals.routed import leave_last_words
from asyncllm.server.http.cuts import CUTS, GIVE_UP_BYTES, MERGE_BYTES, Patience
from asyncllm.server.http.half_close import look_closer
from asyncllm.server.http.middleware import ARRIVED, request_id
from asyncllm.server.streaming.delivery import ClientDelivery, Reply
from asyncllm.server.streaming.frames import EVENT_STREAM
from asyncllm.server.streaming.write_times import WRITE_TIMES

if TYPE_CHECKING:
    from asyncllm.server.http.cuts import Cause
    from asyncllm.types import TokenDelta

log = logging.getLogger(__name__)

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


#: Bytes between two events that clients skip.
_HARMLESS: Final = {EVENT_STREAM: b":\n\n", "application/x-ndjson": b" "}


class _Stream(web.StreamResponse):
    """Headers are written together with the first bytes."""

    _send_headers_immediately = False


class EventStream(ClientDelivery):
    """Writes each step's frames to the client's transport, at most one write per step.

    aiohttp writes the headers and the end of the body. The frames are written here, because its
    ``write`` is a coroutine, and waking a task for each token costs more than the write itself.

    Attributes:
        arrived: when its request did, by ``time.perf_counter``.
        written_at: when tokens were last written, for ``WriteTimes``; 0 before.
    """

    def __init__(self, request: web.Request, reply: Reply, count: int):
        super().__init__(request, count)
        self.arrived = request[ARRIVED]
        self.written_at = 0.0
        self._times = request.app[WRITE_TIMES]
        self._reply = reply
        self._name = request_id.get("-")  # later calls come from other tasks
        self._harmless = _HARMLESS.get(reply.content_type, b"")
        self._chunked = request.version >= HttpVersion11
        self._several = count > 1
        self._open = False
        self._scheduled = False
        self._pending: dict[int, TokenDelta] = {}
        self._written = 0
        self._patience = Patience(asyncio.get_running_loop().time())

    def _take(self, index: int, delta: TokenDelta) -> None:
        held = self._pending.get(index)
        if held is None:
            self._pending[index] = delta
        else:
            held.merge(delta)
        if not self._several and self._reply.explain is None:
            self._flush()
        elif not self._scheduled:
            # Write once for all choices of this step, which follow at once. And a trace is complete
            # only after the engine has delivered this delta.
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def respond(self) -> web.StreamResponse:
        leave_last_words(self._request, self._reply.lost)
        headers = {**HEADERS, "Content-Type": self._reply.content_type}
        response = _Stream(headers=headers)
        if not self._chunked:
            response.force_close()  # HTTP/1.0: the end of the connection is the end of the body
        await response.prepare(self._request)
        await response.write(self._reply.opening())  # the headers go out with it
        self._open = True
        look_closer(self._request)
        self._flush()
        error = await self._ended
        if error is not None:
            if isinstance(error, ConnectionError):
                raise error
            if self._transport.is_closing():
                raise ConnectionResetError("client disconnected") from error
            self._write(self._take_pending() + self._reply.failure(error))
        # Not in aiohttp's write_eof, which would wait for a stalled client forever.
        await self._request.writer.drain()
        return response

    def probe(self) -> bool:
        if not self._open or self._ended.done() or not self._harmless:
            return False  # the stream's own writes are probes
        self._write(self._harmless)
        return True

    def look(self, now: float) -> None:
        if self._client_is_gone():
            return
        if self._pending:
            self._flush()
        unsent = self._transport.get_write_buffer_size()
        cause = self._patience.cause(self._written - unsent, unsent, now)
        if cause is not None:
            self._give_up(cause)

    def _flush(self) -> None:
        """Write the pending deltas, unless the client has too much unread."""
        self._scheduled = False
        transport = self._transport
        if not self._open or self._ended.done():
            return
        if transport.is_closing():
            self._client_is_gone()
            return
        last = not self._unfinished
        unsent = transport.get_write_buffer_size()
        if unsent > MERGE_BYTES and not last:
            if unsent + sum(map(_size, self._pending.values())) > GIVE_UP_BYTES:
                self._give_up("behind")
            return
        try:
            payload = self._take_pending()
            if last:
                payload += self._reply.closing()
        except Exception as error:
            # The engine calls this: an error in one answer must not reach the others.
            log.exception("request failed while its answer was written")
            self.end(error)
            return
        if unsent + len(payload) > GIVE_UP_BYTES:
            self._give_up("behind")
            return
        if payload:
            self._write(payload)
            if not (times := self._times).written:
                asyncio.get_running_loop().call_soon(times.observe)
            times.written.append(self)
        if last:
            self.end()

    def _take_pending(self) -> bytes:
        pending, self._pending = self._pending, {}
        frames = self._reply.frames
        if len(pending) == 1:
            return frames(*pending.popitem())
        return b"".join([frames(index, delta) for index, delta in pending.items()])

    def _write(self, payload: bytes) -> None:
        if not payload:
            return
        if self._chunked:
            payload = b"%x\r\n%b\r\n" % (len(payload), payload)
        self._written += len(payload)
        self._transport.write(payload)

    def _give_up(self, cause: Cause) -> None:
        self.end(ConnectionResetError("client reads too slowly"))
        if not self._transport.is_closing():
            self._request.app[CUTS].cut(self._transport, cause, self._name)


def _size(delta: TokenDelta) -> int:
    """Bytes that a delta takes on the wire, roughly."""
    size = len(delta.text)
    if delta.logprobs:
        size += len(delta.logprobs) * (1 + len(delta.logprobs[0].top)) * 64
    return size
