"""Cutting off clients that read too slowly."""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import math
import termios
from collections import Counter
from contextlib import suppress
from typing import Final, Literal, Protocol

from aiohttp import web

log = logging.getLogger(__name__)

#: With more than this unsent, streams merge deltas until the client has caught up.
MERGE_BYTES: Final = 64 * 1024
#: A client is cut off with more than this unsent, or when it has taken no byte for so long.
GIVE_UP_BYTES: Final = 4 * 1024 * 1024
GIVE_UP_SECONDS: Final = 60.0
#: And when it has had more than MERGE_BYTES unsent for so long, though it takes some bytes.
BEHIND_SECONDS: Final = 600.0
#: How often a client with a large answer is checked.
WATCH_SECONDS: Final = 0.5
#: How often, at most, room is made.
CHECK_SECONDS: Final = 0.1
#: Bytes kept for all clients that are behind. With more, the slowest are cut off: those that have
#: been behind for PATIENT_SECONDS, and need at least LONG_SECONDS more at their pace.
MOST_KEPT: Final = 64 * 1024 * 1024
PATIENT_SECONDS: Final = 1.0
LONG_SECONDS: Final = 5.0

Cause = Literal["stalled", "behind", "room"]

_TEXTS: Final[dict[Cause, str]] = {
    "stalled": "its client has stopped reading",
    "behind": "its client reads too slowly",
    "room": "too much is kept for clients that read slowly, and it is one of the slowest",
}


class Patience:
    """How long a client that reads slowly is waited for."""

    def __init__(self, now: float):
        self._taken = self._taken_then = 0
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
            self._caught_up_at, self._taken_then = now, taken
        if now - self._taken_at > GIVE_UP_SECONDS:
            return "stalled"
        return "behind" if now - self._caught_up_at > BEHIND_SECONDS else None

    def seconds_left(self, left: int, now: float) -> float:
        """How long the client needs for what is left at its pace since it fell behind.

        0 if it has not been behind for long.
        """
        behind = now - self._caught_up_at
        taken = self._taken - self._taken_then
        if behind < PATIENT_SECONDS:
            return 0.0
        return left * behind / taken if taken > 0 else math.inf


class SlowClient(Protocol):
    """A client that has not taken all of its answer yet."""

    def seconds_left(self, now: float) -> float:
        """See ``Patience``."""

    def give_up(self, cause: Cause) -> None:
        """Cut it off; nothing is kept for it any more."""


class SlowClients:
    """Breaks connections off, counts them by cause, and bounds what is kept for slow clients.

    Attributes:
        kept: bytes kept for clients that are behind.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(_TEXTS, 0))
        self.kept = 0
        self._freed = 0
        self._most_kept = most_kept
        self._slow: dict[SlowClient, int] = {}
        self._checked_at = -math.inf

    def keep(self, client: SlowClient, num_bytes: int, now: float) -> None:
        """So many bytes are kept for a client from now on; 0 when it has caught up, or ended."""
        before = self._slow.pop(client, 0)
        self.kept += num_bytes - before
        self._freed += max(0, before - num_bytes)
        if num_bytes:
            self._slow[client] = num_bytes
        if self.kept > self._most_kept and now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._make_room(now)

    def take_freed(self) -> int:
        """How many bytes are no longer kept since the last call."""
        freed, self._freed = self._freed, 0
        return freed

    def _make_room(self, now: float) -> None:
        """Cut off the slowest, as many as it takes; one client alone may have whatever it gets."""
        left = {client: client.seconds_left(now) for client in self._slow}
        slowest = sorted(self._slow, key=lambda client: (left[client], self._slow[client]))
        while self.kept > self._most_kept and len(slowest) > 1:
            client = slowest.pop()
            if left[client] < LONG_SECONDS:
                break
            client.give_up("room")

    def cut_off(self, transport: asyncio.Transport, cause: Cause, name: str) -> None:
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


class SlowAnswer:
    """SlowClients the client off if it takes its answer, which is whole, too slowly."""

    def __init__(self, request: web.BaseRequest, name: str, length: int, clients: SlowClients):
        """
        Args:
            name: the id of the request.
            length: of the answer's body, which is kept until all of it is taken.
        """
        assert request.transport is not None
        self._loop = asyncio.get_running_loop()
        self._transport = request.transport
        self._writer = request.writer
        self._length = length
        self._name = name
        self._clients = clients
        self._patience = Patience(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def seconds_left(self, now: float) -> float:
        return self._patience.seconds_left(self._left, now)

    def give_up(self, cause: Cause) -> None:
        self.stop()
        self._clients.cut_off(self._transport, cause, self._name)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._clients.keep(self, 0, self._loop.time())

    def _check(self) -> None:
        now = self._loop.time()
        taken = self._writer.output_size - unsent(self._transport)
        self._left = max(0, self._length - taken)
        if (cause := self._patience.cause(taken, self._left, now)) is not None:
            self.give_up(cause)
            return
        self._timer = self._loop.call_later(WATCH_SECONDS, self._check)
        self._clients.keep(self, self._length, now)
