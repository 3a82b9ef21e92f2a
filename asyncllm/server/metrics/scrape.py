"""GET /metrics: the tables' text, made when it is asked for and kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import web

from asyncllm.server.http.traffic import TRAFFIC
from asyncllm.server.metrics import engine, server
from asyncllm.server.metrics.metric import CONTENT_TYPE, write
from asyncllm.server.metrics.server import Measured
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.write_times import WRITE_TIMES

#: How often the event loop's lag is measured.
LAG_SECONDS: Final = 0.05
#: How long a text is kept: however many ask, it is made at most ten times a second.
KEPT_SECONDS: Final = 0.1


class Page:
    """The text of ``/metrics``."""

    def __init__(self, measured: Measured, clock: Callable[[], float] = time.monotonic):
        self.measured = measured
        self._clock = clock
        self._body = b""
        self._made_at = -KEPT_SECONDS

    def body(self) -> bytes:
        """The text, at most ``KEPT_SECONDS`` old."""
        now = self._clock()
        if now - self._made_at >= KEPT_SECONDS:
            self._body, self._made_at = self.write().encode(), now
        return self._body

    def write(self) -> str:
        """The text as of now; an engine that is not ready has none yet."""
        service = self.measured.service
        text = write(server.METRICS, self.measured)
        if service.llm.ready:
            text += write(engine.METRICS, service.llm.stats)
            if service.config.metrics_compat == "vllm":
                text += write(server.VLLM_METRICS, self.measured, server.vllm_labels(self.measured))
        return text


PAGE: Final = web.AppKey("asyncllm_metrics", Page)


def add_metrics(app: web.Application) -> None:
    """Give the app a page of its own, so that several apps in one process do not mix."""
    measured = Measured(app[SERVICE], app[TRAFFIC], app[WRITE_TIMES])
    app[PAGE] = Page(measured)

    async def measure(_app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(measure_loop(measured), name="asyncllm-loop-lag")
        yield
        task.cancel()

    app.cleanup_ctx.append(measure)


async def measure_loop(measured: Measured) -> None:
    """Observe how late timers of the event loop run, to a millisecond, and how busy the device is.

    ``result_lag`` is exact, but known only while steps run. How long connections wait to be
    accepted and requests to begin is in ``accept_wait`` and ``start_wait``.
    """
    llm = measured.service.llm
    while True:
        due = time.perf_counter() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        now = time.perf_counter()
        if llm.ready:  # while a model is loaded, imports hold the loop up
            measured.lag.observe(max(0.0, now - due))
            measured.busy.sample(now, llm.stats.device_busy)


async def metrics(request: web.Request) -> web.Response:
    body = request.app[PAGE].body()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
