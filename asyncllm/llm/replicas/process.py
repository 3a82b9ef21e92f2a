"""One replica, from its start to its end, as the program that started it sees it."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import ModelError
from asyncllm.executor.team.process import PeerProcess, start_peer
from asyncllm.llm.replicas.link import Link, unpack_error
from asyncllm.startup.replica_config import replica_config
from asyncllm.supervise.restarts import Restarts

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.config import EngineConfig, EngineLimits

log = logging.getLogger(__name__)

#: A replica may take this long to end by itself.
END_SECONDS: Final = 5.0
#: How often it is looked whether a replica was stopped; it is killed at the second look.
LOOK_SECONDS: Final = 0.5

MODULE: Final = "asyncllm.llm.replica_worker"


class ReplicaProcess:
    """Starts the process again when it dies.

    Attributes:
        is_ready: it takes requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        index: int,
        on_deltas: Callable[[list[tuple[int, Any]]], None],
        on_lost: Callable[[int, str], None],
    ):
        """
        Args:
            on_deltas: gets what requests deliver, by their numbers.
            on_lost: called with ``index``, and how the process ended.
        """
        self.is_ready = False
        self._config = replica_config(config, index)
        self._index = index
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._restarts = Restarts()
        self._process: PeerProcess | None = None
        self._link: Link | None = None
        self._loaded: asyncio.Future[EngineLimits] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_stopped = False
        self._closed = False

    async def start(self) -> EngineLimits:
        """Load the model in a new process.

        Raises:
            ModelError: the process ended before it was ready.
            AsyncLLMError: whatever loading raises.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        settings = {"socket": theirs.fileno(), "config": self._config}
        try:
            self._process = start_peer(self._index, MODULE, settings, [theirs.fileno()])
        finally:
            theirs.close()
        self._loaded = loop.create_future()
        self._link = Link(loop, ours, self._on_message, self._on_end)
        self._look()
        limits = await self._loaded
        self._restarts.ready()
        self.is_ready = True
        return limits

    def send(self, *message: Any) -> None:
        if self._link is not None:
            self._link.send(*message)

    def abandon(self) -> None:
        """It hangs: do not wait for it."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process; nothing is left behind."""
        self._closed = True
        if self._burying is not None:
            await asyncio.wait([self._burying])
        patience = END_SECONDS if self.is_ready else 0.0  # one that loads hears nothing
        self.is_ready = False
        if self._restarting is not None:
            self._restarting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.close, patience)
            self._process = None

    def _on_message(self, kind: str, what: Any) -> None:
        assert self._loaded is not None
        if kind == "deltas":
            self._on_deltas(what)
        elif not self._loaded.done():
            if kind == "ready":
                self._loaded.set_result(what)
            else:
                self._loaded.set_exception(unpack_error(what))

    def _on_end(self) -> None:
        """The process has ended, or is about to."""
        self.is_ready = False
        self._link = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed and self._process is not None:
            self._process.kill()  # its connection is gone: there is nothing more to expect of it
            self._burying = asyncio.get_running_loop().create_task(self._bury(self._process))

    async def _bury(self, process: PeerProcess) -> None:
        """Wait for its end, which may take a while: it gives a GPU's memory back."""
        how = await asyncio.to_thread(process.end)
        if self._closed:
            return
        self._process = None
        process.close(0)
        if self._loaded is not None and not self._loaded.done():
            error = ModelError(f"replica {self._index} {how} before it was ready")
            self._loaded.set_exception(error)
        if (delay := self._restarts.delay()) is not None:
            log.error("replica %d %s: starting it again in %.0f s", self._index, how, delay)
            self._restarting = asyncio.get_running_loop().create_task(self._start_again(delay))
        self._on_lost(self._index, how)

    async def _start_again(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await self.start()
        except Exception as error:
            log.error("replica %d: %s", self._index, error)

    @property
    def may_return(self) -> bool:
        """Whether it is ready, or being started again."""
        restarting = self._restarting
        return self.is_ready or (restarting is not None and not restarting.done())

    def _look(self) -> None:
        process = self._process
        if process is None:
            return
        stopped = process.is_stopped()
        if stopped and self._was_stopped:
            log.error("replica %d is stopped: killing it", self._index)
            process.kill()
        self._was_stopped = stopped
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
