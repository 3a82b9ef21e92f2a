"""The process of a replica, which is started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.startup.replica_config import replica_config
from asyncllm.executor.team.process import PeerProcess, start_peer
from asyncllm.llm.replicas.link import Link, unpack_error
from asyncllm.supervise.server import Restarts
from asyncllm.system.daemon_thread import run_in_daemon, start_in_daemon

log = logging.getLogger(__name__)

#: A replica may take this long to end by itself.
END_SECONDS: Final = 5.0
#: The same after it has closed its connection.
LAST_SECONDS: Final = 1.0
#: How often it is checked whether a replica was stopped; it is killed at the second time.
CHECK_SECONDS: Final = 0.5

MODULE: Final = "asyncllm.llm.replica_worker"


class ReplicaProcess:
    """Starts the process again when it dies.

    Attributes:
        is_ready: it takes requests.
        is_gone: it has ended for good.
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
        self.is_ready = self.is_gone = False
        self._config = replica_config(config, index)
        self._index = index
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._restarts = Restarts()
        self._process: PeerProcess | None = None
        self._link: Link | None = None
        self._loaded: asyncio.Future[EngineLimits] | None = None
        self._cause = ""  # why it ends, if it has said so
        self._restarting: asyncio.Task[None] | None = None
        self._burying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_stopped = False
        self._closed = False

    async def start(self) -> EngineLimits:
        """Load the model in a new process.

        Raises:
            ModelError: no process can be started, or it ended before it was ready.
            AsyncLLMError: whatever loading raises.
        """
        self._start_process()
        self._loaded = asyncio.get_running_loop().create_future()
        return await self._loaded

    def send(self, *message: Any) -> None:
        if self._link is not None:
            self._link.send(*message)

    def abandon(self) -> None:
        """It hangs: do not wait for it."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> asyncio.Future[None]:
        """End the process; nothing is left behind, even if nobody waits for the result."""
        self._closed = True
        patience = END_SECONDS if self.is_ready else 0.0  # one that loads hears nothing
        self.is_ready = False
        if self._restarting is not None:
            self._restarting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is None:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ended.set_result(None)
            return ended
        process, self._process = self._process, None
        # In a thread of its own: those of the event loop may all be busy, waiting for a request.
        return asyncio.wrap_future(start_in_daemon(process.close, patience))

    def _start_process(self) -> None:
        """
        Raises:
            ModelError: this system has no such processes, or not now.
        """
        name = f"replica {self._index}"
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            settings = {"socket": fd, "config": self._config}
            try:
                self._process = start_peer(self._index, MODULE, settings, [fd], name=name)
            except (NotImplementedError, OSError) as error:
                ours.close()
                raise ModelError(f"{name} cannot be started: {error}", param="dp") from None
        self._cause = ""
        self._link = Link(ours, self._on_message, self._on_end)
        self._check()

    def _on_message(self, kind: str, what: Any) -> None:
        loaded = self._loaded  # of the first process
        if kind == "deltas":
            self._on_deltas(what)
        elif kind == "ready":
            self._restarts.ready()
            self.is_ready = True
            if loaded is not None and not loaded.done():
                loaded.set_result(what)
        elif kind == "failed":
            error = unpack_error(what)
            self._cause = str(error)
            if loaded is not None and not loaded.done():
                loaded.set_exception(error)
        else:
            self._cause = what

    def _on_end(self) -> None:
        """The process has ended, or is about to."""
        self.is_ready = False
        self._link = None
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed and self._process is not None:
            self._burying = asyncio.get_running_loop().create_task(self._bury(self._process))

    async def _bury(self, process: PeerProcess) -> None:
        """Wait for its end, which may take a while: it gives a GPU's memory back."""
        # Its connection is gone: there is nothing more to expect of it but its exit code.
        how = await run_in_daemon(process.end, 0.0 if self._cause else LAST_SECONDS)
        if self._closed:
            return
        self._process = None
        process.close(0)
        if self._cause:
            how = f"has ended: {self._cause}"
        if self._loaded is not None and not self._loaded.done():
            error = ModelError(f"replica {self._index} {how} before it was ready")
            self._loaded.set_exception(error)
        self._lost(how)

    def _lost(self, how: str) -> None:
        """Start it again, if that may help."""
        delay = self._restarts.delay()
        if delay is not None:
            log.error("replica %d %s; it is started again in %.0f s", self._index, how, delay)
            self._restarting = asyncio.get_running_loop().create_task(self._start_again(delay))
        else:
            self.is_gone = True
            if self._restarts.count:
                log.error("replica %d %s; it is not started again", self._index, how)
        self._on_lost(self._index, how)

    async def _start_again(self, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            self._start_process()
        except ModelError as error:
            self._lost(f"has ended: {error.message}")

    def _check(self) -> None:
        process = self._process
        if process is None:
            return
        stopped = process.is_stopped()
        if stopped and self._was_stopped:
            self._cause = "it was stopped (SIGSTOP), and so killed"
            process.kill()
        self._was_stopped = stopped
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check)
