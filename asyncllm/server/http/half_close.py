"""Clients that have closed their side of the connection: some still wait, others are gone.

TCP signals both alike, as the end of their bytes. They differ when something is written: a client
that has closed the connection answers with a reset, one that only shut its sending side down takes
the bytes. So we write something harmless while the answer is not ready: in a stream an SSE comment,
before other answers the interim response "100 Continue", which HTTP/1.1 clients skip.

HTTP/1.0 has no interim responses. There, a client that closes before an answer that is not streamed
counts as gone: proxies that speak 1.0 close like this when their own client leaves.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Final

from aiohttp import HttpVersion11, web

from asyncllm.supervise.front_channel import CONTINUE

#: A function that writes something harmless to the client; False when it cannot yet.
PROBE: Final = web.RequestKey("asyncllm_probe", object)

#: First wait for the reset after a probe; it doubles with each check, up to ``CHECK_SECONDS``.
FIRST_CHECK_SECONDS: Final = 0.002
CHECK_SECONDS: Final = 0.25
#: Between the first two probes; it doubles each time, because some clients accept only a few
#: interim responses.
PROBE_SECONDS: Final = 1.0


class HalfClosed:
    """Aborts a connection whose client turns out to be gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        probe: Callable[[], bool],
    ):
        """``probe``: writes something harmless; False when nothing can be written yet."""
        self._loop = loop
        self._transport = transport
        self._probe = probe
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)  # errors only
        self._pause = FIRST_CHECK_SECONDS
        self._probe_pause = PROBE_SECONDS
        self._probe_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Probe if it is time to, and abort the connection if the client is gone."""
        self.stop()
        if self._transport.is_closing():
            return
        now = self._loop.time()
        if now >= self._probe_at and self._probe():
            self._probe_at = now + self._probe_pause
            self._probe_pause *= 2
            self._pause = FIRST_CHECK_SECONDS
        if self._poll.poll(0):
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._pause, self.check)
        self._pause = min(2 * self._pause, CHECK_SECONDS)


def expect_answer(request: web.Request) -> None:
    """Probe the client from now on, before its answer begins."""
    request[PROBE] = partial(send_continue, request)
    check_half_closed(request)


def send_continue(request: web.Request) -> bool:
    """Write an interim response; False where that is not possible."""
    if request.transport is None or request.version < HttpVersion11:
        return False
    request.transport.write(CONTINUE)
    return True


def check_half_closed(request: web.Request) -> None:
    """Check at once whether a client that has half-closed is gone: probing is possible now."""
    # The connections of a host application close when the client closes its side.
    half_closed: HalfClosed | None = getattr(request.protocol, "half_closed", None)
    if half_closed is not None:
        half_closed.check()
