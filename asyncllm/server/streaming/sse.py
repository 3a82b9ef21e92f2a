"""Streamed answers. The engine's delivery writes them, so no task wakes up for a token."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiohttp import HttpVersion11, web

from asyncllm.server.arrivals.routed import leave_last_words
from asyncllm.server.http.half_close import check_half_closed
from asyncllm.server.http.middleware import ARRIVED, request_id
from asyncllm.server.http.slow_clients import GIVE_UP_BYTES, MERGE_BYTES, Cause, Patience
from asyncllm.server.http.traffic import TRAFFIC
from asyncllm.server.streaming.delivery import (
    DELTA_BYTES,
    LARGE_ANSWER,
    ClientDelivery,
    Reply,
    make_trace,
    size_of,
)
from asyncllm.server.streaming.frames import EVENT_STREAM
from asyncllm.server.streaming.write_times import WRITE_TIMES
from asyncllm.types import TokenDelta

log = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


#: When a client is behind, its pending deltas become frames once they have so many bytes.
FRAME_BYTES: Final = 64 * 1024
#: Bytes between two events that clients skip.
_HARMLESS: Final = {EVENT_STREAM: b":\n\n", "application/x-ndjson": b" "}


class _Stream(web.StreamResponse):
    """Headers are written together with the first bytes."""

    _send_headers_immediately = False


class EventStream(ClientDelivery):
    """Writes each step's frames to the client's transport, at most one write per step.

    aiohttp writes the headers and the end of the body. The frames are written here, because its
    ``write`` is a coroutine, and waking a task for each token costs more than the write itself.
    The request's task is woken only for frames that take long: it has a thread make them.

    Attributes:
        arrived: when its request did, by ``time.perf_counter``.
        written_at: when tokens were last written, for ``WriteTimes``; 0 before.
    """

    def __init__(self, request: web.Request, reply: Reply, count: int):
        super().__init__(request, count)
        self.arrived = request[ARRIVED]
        self.written_at = 0.0
        self._times = request.app[WRITE_TIMES]
        self._slow_clients = request.app[TRAFFIC].slow_clients
        self._reply = reply
        self._name = request_id.get("-")  # later calls come from other tasks
        self._harmless = _HARMLESS.get(reply.content_type, b"")
        self._chunked = request.version >= HttpVersion11
        self._count = count
        self._open = False
        self._scheduled = False
        #: Deltas that are not written yet, their size, and that of all so far.
        self._pending: dict[int, TokenDelta] = {}
        self._pending_size = self._total_size = 0
        #: Frames made for a client that is behind: bytes take less memory, and give it back.
        self._ready: list[bytes] = []
        self._ready_size = 0
        self._is_buffering = False
        #: Set when the task is to have something made in a thread, or at the end.
        self._woken = asyncio.Event()
        self._in_thread = False
        self._written = 0
        self._patience = Patience(asyncio.get_running_loop().time())

    def _take(self, index: int, delta: TokenDelta) -> None:
        size = size_of(delta)
        self._pending_size += size
        self._total_size += size
        if (pending := self._pending.get(index)) is None:
            self._pending[index] = delta
        else:
            pending.merge(delta)
        if self._count == 1 and self._reply.explain is None:
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
        opening = self._reply.opening
        many = self._count * DELTA_BYTES > LARGE_ANSWER
        await response.write(await asyncio.to_thread(opening) if many else opening())
        self._open = True  # the headers went out with it
        check_half_closed(self._request)
        self._flush()
        try:
            await self._finish()
        finally:
            self._report_buffered(0)
        return response

    async def _finish(self) -> None:
        """Have a thread do what takes long, until the answer has ended and is written."""
        while True:
            await self._woken.wait()
            if self._ended.done():
                break
            self._woken.clear()
            await self._flush_in_thread()
        error = self._ended.result()
        if error is not None:
            if isinstance(error, ConnectionError):
                raise error
            if self._transport.is_closing():
                raise ConnectionResetError("client disconnected") from error
            rest = self._frames(*self._take_pending()) + self._reply.failure(error)
            self._write(b"".join((*self._ready, rest)))
        # Not in aiohttp's write_eof, which would wait for a stalled client forever.
        await self._request.writer.drain()

    def end(self, error: Exception | None = None) -> None:
        super().end(error)
        self._woken.set()

    def seconds_left(self, now: float) -> float:
        return self._patience.seconds_left(self._num_buffered(), now)

    def probe(self) -> bool:
        if not self._open or self._ended.done() or not self._harmless:
            return False  # the stream's own writes are probes
        self._write(self._harmless)
        return True

    def check_client(self, now: float) -> None:
        if self._client_is_gone():
            return
        if self._pending or self._ready:
            self._flush()
        unsent = self._transport.get_write_buffer_size()
        self._report_buffered(self._num_buffered() if unsent > MERGE_BYTES else 0)
        cause = self._patience.cause(self._written - unsent, unsent, now)
        if cause is not None:
            self.give_up(cause)

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
        behind = unsent > MERGE_BYTES
        if behind and unsent + self._ready_size + self._pending_size > GIVE_UP_BYTES:
            self.give_up("behind")
        elif behind and not last:
            self._buffer()
        elif not self._in_thread:
            self._catch_up(last)

    def _buffer(self) -> None:
        """The client has enough to read: more is kept until it has caught up."""
        if self._pending_size > FRAME_BYTES and not self._in_thread:
            try:
                frames = self._frames(*self._take_pending())
            except Exception as error:
                self._fail(error)
                return
            self._ready.append(frames)
            self._ready_size += len(frames)
        self._report_buffered(self._num_buffered())

    def _catch_up(self, last: bool) -> None:
        """Write all that was kept, and what is new."""
        much = self._pending_size + DELTA_BYTES * len(self._pending) > LARGE_ANSWER
        if much or (last and self._total_size > LARGE_ANSWER):  # some replies repeat all at the end
            self._in_thread = True
            self._woken.set()
            return
        try:
            self._send(self._frames(*self._take_pending()), last=last)
        except Exception as error:
            self._fail(error)

    async def _flush_in_thread(self) -> None:
        """Write the pending deltas, which take too long for the event loop."""
        pending, last = self._take_pending()
        if last:
            make_trace(self._reply)
        try:
            payload = await asyncio.to_thread(self._frames, pending, last)
        except Exception as error:
            self._fail(error)
            return
        self._in_thread = False
        if not self._ended.done():
            self._send(payload, last=last)
            self._flush()  # what came meanwhile
        elif not self._transport.is_closing():
            self._ready.append(payload)  # before the error

    def _take_pending(self) -> tuple[dict[int, TokenDelta], bool]:
        """What is to be written, and whether it is the last."""
        pending, self._pending, self._pending_size = self._pending, {}, 0
        return pending, not self._unfinished

    def _frames(self, pending: dict[int, TokenDelta], last: bool) -> bytes:
        frames = [self._reply.frames(index, delta) for index, delta in pending.items()]
        if last and self.error is None:
            frames.append(self._reply.closing())
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _send(self, payload: bytes, *, last: bool) -> None:
        if self._ready:
            payload = b"".join((*self._ready, payload))
            self._ready, self._ready_size = [], 0
        if self._transport.get_write_buffer_size() + len(payload) > GIVE_UP_BYTES:
            self.give_up("behind")
            return
        if payload:
            self._write(payload)
            if not (times := self._times).written:
                asyncio.get_running_loop().call_soon(times.observe)
            times.written.append(self)
        if last:
            self.end()

    def _fail(self, error: Exception) -> None:
        """The engine calls: an error in one answer must not reach the others."""
        log.exception("request failed while its answer was written", exc_info=error)
        self.end(error)

    def _write(self, payload: bytes) -> None:
        if not payload:
            return
        if self._chunked:
            payload = b"%x\r\n%b\r\n" % (len(payload), payload)
        self._written += len(payload)
        self._transport.write(payload)

    def _num_buffered(self) -> int:
        unsent = self._transport.get_write_buffer_size()
        return unsent + self._ready_size + self._pending_size

    def _report_buffered(self, num_bytes: int) -> None:
        if num_bytes or self._is_buffering:
            self._is_buffering = num_bytes > 0
            self._slow_clients.keep(self, num_bytes, asyncio.get_running_loop().time())

    def give_up(self, cause: Cause) -> None:
        """Cut the client off."""
        self.end(ConnectionResetError("client reads too slowly"))
        self._report_buffered(0)
        if not self._transport.is_closing():
            self._slow_clients.cut_off(self._transport, cause, self._name)
