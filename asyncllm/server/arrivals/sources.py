"""How connections come to the process: by its own port, its parent's, or one by one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.arrivals.forwarding import forward
from asyncllm.server.arrivals.hand_over import add_hand_over, is_second
from asyncllm.server.arrivals.names import NUMBERS, Numbers
from asyncllm.server.arrivals.routed import add_routing, adopt
from asyncllm.server.http.listener import Listener
from asyncllm.supervise.child import Parent
from asyncllm.supervise.front_channel import FrontChannel
from asyncllm.supervise.listening import listen, url_of
from asyncllm.supervise.standard_files import announce
from asyncllm.supervise.tls import Tls


class ConnectionSource:
    """Where connections come from. Methods are called in this order, and do nothing by default."""

    def prepare(
        self, app: web.Application, has_died: Callable[[], bool], how: Callable[[], bytes]
    ) -> None:
        """
        Args:
            has_died: whether requests that are not answered yet should go elsewhere.
            how: says how the server is, in JSON.
        """

    async def begin(self, listener: Listener, tls: Tls | None) -> None:
        """Connections come from now on."""

    def ready(self, about: str, *, wants_standby: bool) -> None:
        """The model is loaded; ``about`` says what it is, in a line.

        Args:
            wants_standby: a process should stand by; only the parent of a single server has one.
        """

    def leaving(self) -> None:
        """The server drains, or its engine has died: it is about to end."""

    def close(self) -> None:
        """Take nothing more from a parent."""


def source_of(config: ServerConfig, parent: Parent | None) -> ConnectionSource | None:
    """None, after a line in the log, if the port cannot be listened on."""
    if parent is None:
        sockets = listen(config.host, config.port)
        return None if sockets is None else OwnPort(sockets)
    return InheritedPort(parent) if parent.replica is None else FromFront(parent)


class OwnPort(ConnectionSource):
    """Nobody else has the port."""

    def __init__(self, sockets: Sequence[socket.socket]):
        self._sockets = sockets
        self._url = ""
        self._listener: Listener | None = None

    async def begin(self, listener: Listener, tls: Tls | None) -> None:
        await listener.start(self._sockets, tls)
        self._listener = listener
        self._url = url_of(*listener.address, scheme="https" if tls else "http")

    def ready(self, about: str, *, wants_standby: bool) -> None:
        announce(f"asyncllm is ready on {self._url} ({about})")

    def leaving(self) -> None:
        if self._listener is not None:
            self._listener.leave()


class InheritedPort(OwnPort):
    """A parent process holds the port, and requests of the server that was here before."""

    def __init__(self, parent: Parent):
        super().__init__(parent.sockets)
        self._parent = parent

    def prepare(
        self, app: web.Application, has_died: Callable[[], bool], how: Callable[[], bytes]
    ) -> None:
        add_hand_over(app, self._parent, has_died)
        app[NUMBERS] = Numbers(restarts=self._parent.restarts)

    async def begin(self, listener: Listener, tls: Tls | None) -> None:
        self._parent.take_over()
        await super().begin(listener, tls)

    def ready(self, about: str, *, wants_standby: bool) -> None:
        self._parent.ready(about)  # first: whoever reads the line may end this process at once
        if wants_standby:
            self._parent.ask_for_standby()
        super().ready(about, wants_standby=wants_standby)
        asyncio.get_running_loop().add_reader(self._parent.fileno(), self._adopt)

    def leaving(self) -> None:
        super().leaving()
        # What the parent has given, and nobody has taken here, is for the next server.
        asyncio.get_running_loop().remove_reader(self._parent.fileno())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._parent.fileno())
        self._parent.close()

    def _adopt(self) -> None:
        assert self._listener is not None
        for connection, request in self._parent.handed_over():
            self._listener.adopt(connection, (request,), is_second, lambda: None)


class FromFront(ConnectionSource):
    """The parent process accepts all connections, and gives each request to one of its replicas."""

    def __init__(self, parent: Parent):
        self._parent = parent
        self._channel: FrontChannel | None = None

    def prepare(
        self, app: web.Application, has_died: Callable[[], bool], how: Callable[[], bytes]
    ) -> None:
        parent = self._parent
        self._how = how
        add_routing(app, Numbers(parent.replica, parent.restarts, parent.num_replicas), has_died)
        app.middlewares.append(forward)

    async def begin(self, listener: Listener, tls: Tls | None) -> None:
        await listener.start(())
        self._parent.take_over()
        for listening in self._parent.sockets:
            listening.close()
        self._channel = FrontChannel(self._parent.channel, self._how)
        asyncio.get_running_loop().add_reader(
            self._parent.fileno(), partial(adopt, listener, self._channel)
        )

    def ready(self, about: str, *, wants_standby: bool) -> None:
        assert self._channel is not None
        self._channel.ready(about)

    def leaving(self) -> None:
        assert self._channel is not None
        self._channel.leaving()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._parent.fileno())
        self._parent.close()
