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

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

#: With more than this unsent, streams merge deltas until the client has caught up.
MERGE_BYTES: Final = 64 * 1024
#: A client is cut off with more than this unsent, or when it has taken no byte for so long.
GIVE_UP_BYTES: Final = 4 * 1024 * 1024
GIVE_UP_SECONDS: Final = 60.0

Cause = Literal["stalled", "behind"]

_TEXTS: Final[dict[Cause, str]] = {
    "stalled": "its client has stopped reading",
    "behind": "its client reads too slowly",
}


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
    queued = array.array("i", [0])
    socket = transport.get_extra_info("socket")
    if socket is not None:
        with suppress(OSError, ValueError):  # it is closed
            fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + queued[0]


CUTS: Final = web.AppKey("asyncllm_cuts", Cuts)
