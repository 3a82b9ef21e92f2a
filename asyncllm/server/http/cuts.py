"""Cutting off clients that read too slowly."""

from __future__ import annotations

import array
import fcntl
import logging
import termios
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from aiohttp import web

from asyncllm.server.http.middleware import request_id

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

#: With more than this unsent, streams merge deltas until the client has caught up.
MERGE_BYTES: Final = 64 * 1024
#: A client is cut off with more than this unsent, or when it has taken no byte for so long.
GIVE_UP_BYTES: Final = 4 * 1024 * 1024
GIVE_UP_SECONDS: Final = 60.0
#: And when it has had more than MERGE_BYTES unsent for so long, though it takes some bytes.
BEHIND_SECONDS: Final = 600.0
#: How often a client with a large answer is looked at.
WATCH_SECONDS: Final = 0.5

Cause = Literal["stalled", "behind"]

_TEXTS: Final[dict[Cause, str]] = {
    "stalled": "its client has stopped reading",
    "behind": "its client reads too slowly",
}


class Patience:
    """How long a client that reads slowly is waited for."""

    def __init__(self, now: float):
        self._taken = 0
        self._taken_at = self._caught_up_at = now

    def cause(self, taken: int, left: int, now: float) -> Cause | None:
        """Why the client is cut off now, if it is.

        Args:
            taken: bytes that it has taken so far; only changes count.
            left: bytes that it has not taken yet.
            now: in seconds.
        """
        if taken != self._taken or not left:
            self._taken, self._taken_at = taken, now
        if left <= MERGE_BYTES:
            self._caught_up_at = now
        if now - self._taken_at > GIVE_UP_SECONDS:
            return "stalled"
        return "behind" if now - self._caught_up_at > BEHIND_SECONDS else None


class Cuts:
    """Breaks connections off, and counts them by cause."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(_TEXTS, 0))

    def cut(self, transport: asyncio.Transport, cause: Cause, name: str) -> None:
        """Break a connection off; ``name`` is the id of its request."""
        self.counts[cause] += 1
        log.warning(
            "request %s cut off: %s, %d bytes unsent", name, _TEXTS[cause], unsent(transport)
        )
        transport.abort()


def unsent(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken yet, in our buffer and in the kernel's.

    The kernel's is megabytes large, and is filled again only when a good part of it is sent.
    """
    return transport.get_write_buffer_size() + _queued(transport, termios.TIOCOUTQ)


def unread(transport: asyncio.Transport) -> int:
    """Bytes that the client has sent, and that we have not taken yet."""
    return _queued(transport, termios.FIONREAD)


def _queued(transport: asyncio.Transport, which: int) -> int:
    queued = array.array("i", [0])
    socket = transport.get_extra_info("socket")
    if socket is not None:
        with suppress(OSError, ValueError):  # it is closed
            fcntl.ioctl(socket.fileno(), which, queued)
    return queued[0]


class CutIfSlow:
    """Cuts the client off if it takes its answer too slowly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, cuts: Cuts):
        self._loop = loop
        self._transport = transport
        self._cuts = cuts
        self._patience = Patience(loop.time())
        self._look()

    def _look(self) -> None:
        left = unsent(self._transport)
        cause = self._patience.cause(-left, left, self._loop.time())
        if cause is not None:
            self._cuts.cut(self._transport, cause, request_id.get("-"))
            return
        self._timer = self._loop.call_later(WATCH_SECONDS, self._look)

    def stop(self) -> None:
        self._timer.cancel()


CUTS: Final = web.AppKey("asyncllm_cuts", Cuts)
