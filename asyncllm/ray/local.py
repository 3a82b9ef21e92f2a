"""``asyncllm serve --ray``: the application on this machine, until a signal comes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

# Before Ray is imported: it would tell its makers that it was started.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from asyncllm.errors import BadRequest
from asyncllm.ray.application import QUIET, build, check
from asyncllm.supervise.listening import listen, url_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.config import EngineConfig
    from asyncllm.config.ray_config import RayConfig
    from asyncllm.config.server_config import ServerConfig

log = logging.getLogger(__name__)

#: Ray Serve's name for the application.
NAME: Final = "asyncllm"


def run(engine: EngineConfig, server: ServerConfig, config: RayConfig) -> int:
    """Serve until SIGINT or SIGTERM; must be called in the main thread. Returns an exit code.

    Raises:
        BadRequest: an option has no meaning with Ray.
    """
    check(engine, config)
    sockets = listen(server.host, server.port)
    if sockets is None:
        return 1
    with hold_port(sockets) as port, _ray(engine, config), _stop_signals() as stop:
        if serve.status().proxies:
            log.error(
                "Ray Serve runs already, on a port of its own: take 'serve run asyncllm.ray:app'"
            )
            return 1
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options=_http_options(server, port),
                logging_config=QUIET,
            )
            serve.run(build(engine, server, config), name=NAME, route_prefix="/")
            url = url_of(server.host, port, "https" if server.tls else "http")
            print(
                f"asyncllm is ready on {url} (Ray Serve, replicas: {config.replicas})", flush=True
            )
            stop.wait()
        except RuntimeError as error:
            log.error("%s %s", error, _reason())
            return 1
        finally:
            serve.delete(NAME)
            serve.shutdown()
    return 0


@contextmanager
def hold_port(sockets: list[socket.socket]) -> Iterator[int]:
    """The port of these listening sockets, kept for Ray Serve, which opens it some seconds later.

    In their place, sockets are bound that do not listen. Ray Serve binds its own beside them
    (SO_REUSEPORT), and the system gives the port to nobody else.
    """
    with ExitStack() as held:
        for listening in sockets:
            address, family = listening.getsockname(), listening.family
            listening.close()
            holding = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                holding.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            holding.bind(address)
        yield address[1]


@contextmanager
def _ray(engine: EngineConfig, config: RayConfig) -> Iterator[None]:
    """The Ray that runs already, or one that ends with us."""
    needed = config.most * engine.tp * (engine.cpu_threads or 1)
    cpus = max(needed, os.cpu_count() or 1)
    try:
        ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
        ends_with_us = True
    except ValueError:  # of a Ray that runs already, one cannot say how many it has
        ray.init(logging_level=logging.WARNING)
        ends_with_us = False
    try:
        _check_machines(config.machines, ends_with_us)
        yield
    finally:
        ray.shutdown()


def _check_machines(machines: int, ends_with_us: bool) -> None:
    """
    Raises:
        BadRequest: there are fewer, and no others can come.
    """
    found = sum(node["Alive"] for node in ray.nodes())
    if machines <= found:
        return
    if ends_with_us:
        raise BadRequest(
            f"machines ({machines}): no Ray runs here that has others; 'ray start' begins one",
            param="machines",
        )
    log.warning("replicas wait until Ray has %d machines; it has %d", machines, found)


def _reason() -> str:
    """Why replicas cannot start: the last line of what they say."""
    deployments = serve.status().applications[NAME].deployments.values()
    lines = [line for each in deployments for line in each.message.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _http_options(server: ServerConfig, port: int) -> dict[str, Any]:
    options: dict[str, Any] = {"host": server.host, "port": port}
    if server.tls is not None:
        options["ssl_certfile"], options["ssl_keyfile"] = server.tls
    return options


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
