"""The server process: port, loading, draining. ``Shutdown`` handles signals and deadlines."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from asyncllm.config.option_names import name_options
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import AsyncLLMError, EngineDead, NotReady
from asyncllm.executor.startup_bill import ProcessBill
from asyncllm.server.app import create_app
from asyncllm.server.arrivals.sources import ConnectionSource, source_of
from asyncllm.server.garbage import collect_when_quiet
from asyncllm.server.http.answer import encode
from asyncllm.server.http.browsers import guard
from asyncllm.server.http.listener import Listener
from asyncllm.server.http.traffic import TRAFFIC
from asyncllm.server.model import Model
from asyncllm.server.native.health import health_of
from asyncllm.server.reload import RELOADER, InForce, Options, reload_when_told
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.shutdown import Shutdown
from asyncllm.server.throughput_log import log_throughput
from asyncllm.server.watchdog import WATCHDOG, Watchdog
from asyncllm.supervise.child import Parent
from asyncllm.supervise.front.hosts import hosts_of
from asyncllm.supervise.signals import DEAD, GRACE_SECONDS
from asyncllm.supervise.tls import Tls
from asyncllm.system.event_loop import new_event_loop

log = logging.getLogger(__name__)

#: Limit of each of the three steps of closing: streams that were cut off write their last frames,
#: handlers return, cancelled handlers return. Together they fit into ``GRACE_SECONDS``.
CLOSE_SECONDS: Final = 1.0


def run(
    make_llm: Callable[[], Model],
    config: ServerConfig,
    *,
    parent: Parent | None = None,
    options: tuple[Options, Callable[[], Options]] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Serve until a signal comes; blocks, and must be called in the main thread.

    Args:
        parent: the process that supervises this one, and holds the listening sockets.
        options: those that the process was started with, and a function that reads them again.

    Returns:
        The exit code of the process: 0 after a signal, ``DEAD`` if the engine died. After
        a signal it ends within ``drain_seconds`` plus ``grace_seconds`` in any case; its code is
        not 0 if it had to be forced.
    """
    # aiohttp logs malformed bodies with tracebacks; our own errors are logged by the application
    # and by its connections.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    shutdown = Shutdown(config.drain_seconds, grace_seconds, is_supervised=parent is not None)

    async def main() -> int:
        return await serve(make_llm(), config, shutdown, parent, options)

    def run_loop() -> int:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(main())

    return shutdown.run(run_loop)


async def serve(
    llm: Model,
    config: ServerConfig,
    shutdown: Shutdown,
    parent: Parent | None = None,
    options: tuple[Options, Callable[[], Options]] | None = None,
) -> int:
    """Bind the port, load the model, serve until a signal comes, drain; returns an exit code.

    The port is bound first, so a port in use shows before minutes of loading, and clients get 503
    with Retry-After meanwhile instead of a refused connection.
    """
    shutdown.attach(asyncio.get_running_loop())
    config, keys = _in_force(config, parent)
    app = create_app(llm, config, keys)
    app[WATCHDOG].ending = shutdown
    listener = Listener(app, request_seconds=config.request_seconds, close_seconds=CLOSE_SECONDS)
    tls = _load_tls(config)
    source = source_of(config, parent)
    if source is None:
        return 1
    service = app[SERVICE]
    if (hosts := hosts_of(config)) is not None:
        app.middlewares.append(guard(hosts, config.cors_origin))
    source.prepare(
        app, lambda: not llm.healthy and not service.draining, lambda: _how(service, app[WATCHDOG])
    )
    reloader = app[RELOADER]
    reloader.tls = tls
    if parent is not None:
        reloader.remember = parent.remember
        parent.remember(InForce(config, keys).encode())
    await source.begin(listener, tls)
    if parent is not None and parent.memory:
        reloader.put_in_force(InForce.decode(parent.memory))
    if options is not None:
        reloader.start, reloader.read = options
    heeded = parent.reloaded if parent is not None else lambda: None
    reloading = asyncio.ensure_future(reload_when_told(shutdown.reload, reloader, heeded))
    # Of the first server, the start of the parent counts, which is that of the command.
    bill = ProcessBill(
        os.getppid() if parent is not None and not parent.restarts else None,
        None if parent is None else parent.took_over_at,
    )
    loading = asyncio.ensure_future(llm.start())
    try:
        await _first_of(loading, shutdown.stop)
        if not loading.done():
            return 0
        if (error := loading.exception()) is not None:
            _log_load_error(error)
            return 1
        return await _serve_until(shutdown, llm, app, source, bill)
    finally:
        shutdown.closing()
        reloading.cancel()
        loading.cancel()
        await asyncio.wait([loading])
        await listener.aclose(None if llm.healthy else EngineDead("the engine has stopped"))
        await llm.aclose()
        source.close()


async def _serve_until(
    shutdown: Shutdown,
    llm: Model,
    app: web.Application,
    source: ConnectionSource,
    bill: ProcessBill,
) -> int:
    """The model is loaded: serve, drain; returns an exit code."""
    service = app[SERVICE]
    # Two threads share the GIL; measured, the default of 5 ms costs 5 to 10 % of throughput. Not
    # before: loading takes longer with more switches.
    sys.setswitchinterval(1e-4)
    limits = llm.limits
    log.info("start-up:\n%s", bill.whole(llm.startup))
    if names := " and ".join(compiled_each_time()):
        why = why_not_kept()
        log.info("Python compiled %s, as at each start: bytecode is not kept, as %s", names, why)
    standby = service.config.standby
    source.ready(
        f"model {service.model_names[0]}, {limits.device}, {limits.dtype}, "
        f"context {limits.max_model_len}, KV cache {limits.num_pages * limits.page_size} tokens",
        wants_standby=limits.device == "cuda" if standby is None else standby,
    )
    stopped = asyncio.ensure_future(llm.stopped())
    reporting = asyncio.ensure_future(log_throughput(llm.stats))

    def num_requests() -> int:  # one of HTTP may be thousands of the engine's
        return max(len(service.live), llm.stats.running + llm.stats.waiting)

    collecting = asyncio.ensure_future(
        collect_when_quiet(num_requests, app[TRAFFIC].slow_clients.take_freed)
    )
    await _first_of(stopped, shutdown.stop)
    reporting.cancel()
    collecting.cancel()
    if stopped.done():
        log.error("the engine died: %s", stopped.result())
        shutdown.engine_died()
        source.leaving()
        app[WATCHDOG].engine_died(stopped.result())
        return DEAD
    stopped.cancel()
    source.leaving()
    await _drain(service, shutdown.hurry)
    return 0


async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Let running requests finish; those left when time is up get an error."""
    service.draining = True
    if service.live:
        log.info("stopping: waiting for %d requests", len(service.live))
    finished = asyncio.ensure_future(service.live.wait_empty())
    await _first_of(finished, hurry, service.config.drain_seconds)
    if service.live:
        log.warning("stopping: cutting %d requests off", len(service.live))
        service.live.end_all(NotReady("the server is shutting down"))
        await asyncio.wait([finished], timeout=CLOSE_SECONDS)
    finished.cancel()


async def _first_of(
    future: asyncio.Future[Any], event: asyncio.Event, seconds: float | None = None
) -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([future, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _how(service: Service, watchdog: Watchdog) -> bytes:
    """What the front says of this replica when it does not answer."""
    health = health_of(service, watchdog.stall)
    return encode({"health": health, "server_load": len(service.live)})


def _in_force(config: ServerConfig, parent: Parent | None) -> InForce:
    """As the server before this one had it, if there was one: files may have changed since.

    Raises:
        OSError, BadRequest: the file of API keys cannot be read, or is wrong.
    """
    if parent is None or not parent.memory:
        return InForce.since_start(config)
    found = InForce.decode(parent.memory)
    logging.getLogger("asyncllm").setLevel(found.config.log_level.upper())
    return found


def _load_tls(config: ServerConfig) -> Tls | None:
    if config.tls is None:
        return None
    from asyncllm.supervise.tls import Tls, load_context

    return Tls(load_context(*config.tls))


def _log_load_error(error: BaseException) -> None:
    """One line for the user's errors, a traceback for ours."""
    if isinstance(error, AsyncLLMError):
        log.error("cannot load the model: %s", name_options(error.message, error.param))
    else:
        log.error("cannot load the model: %s", error, exc_info=error)


#: Most of the modules that a server imports are theirs.
PACKAGES: Final = ("asyncllm", "torch")


def compiled_each_time() -> list[str]:
    """Those of PACKAGES that were imported and have no bytecode, also now.

    Python then compiles more than a thousand modules at each start, which takes seconds. pip makes
    bytecode when it installs, uv does not; imports write what is missing, if they may.
    """
    return [name for name in PACKAGES if name in sys.modules and not _is_kept(name)]


def why_not_kept() -> str:
    """Why Python does not keep it."""
    if not sys.dont_write_bytecode:
        return "their folder cannot be written to"
    is_set = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    return "PYTHONDONTWRITEBYTECODE is set" if is_set else "Python runs with the option -B"


def _is_kept(name: str) -> bool:
    spec = getattr(sys.modules[name], "__spec__", None)
    source, cached = getattr(spec, "origin", None), getattr(spec, "cached", None)
    if source is None or cached is None or not os.path.exists(source):
        return True  # in no file of its own, so nothing can be said
    return os.path.exists(cached)
