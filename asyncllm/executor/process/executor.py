"""The loop's handle on an executor that is a process of its own: rank 0. Linux only."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.awaited_results import AwaitedResults
from asyncllm.executor.process.grammars import RemoteGrammars
from asyncllm.executor.process.main import ExecutorSettings
from asyncllm.executor.process.reports import (
    Compiled,
    Failed,
    KernelsReady,
    KernelsWanted,
    Progress,
    Refused,
    Started,
    ToProcess,
    decode_from_process,
    encode,
)
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.machines import Machines
from asyncllm.executor.team.monitor import Monitor
from asyncllm.executor.team.process import PeerProcess, close_peers, start_peer
from asyncllm.system.daemon_thread import run_in_daemon
from asyncllm.wire.channel import FLUSH
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.heartbeat import Heartbeat, Operation
from asyncllm.wire.socket_channel import SocketLink

log = logging.getLogger(__name__)

#: How long closing waits for the steps in flight, and for the process after them.
CLOSE_SECONDS: Final = 30.0
#: How long it then waits for a process that is killed.
KILL_SECONDS: Final = 10.0


class RemoteHeartbeat(Heartbeat):
    """A heartbeat whose operation another process writes."""

    __slots__ = ("process",)

    def __init__(self) -> None:
        super().__init__()
        self.process: PeerProcess | None = None

    @property
    def operation(self) -> Operation:
        if self.process is None:
            return super().operation
        return self.process.operation()


class ProcessExecutor:
    """An ``Executor`` whose worker is rank 0 in a process of its own.

    That process runs what ``ThreadExecutor`` runs in a thread, and starts the other ranks. Plans
    and results cross one socket, as bytes; everything else crosses another one. The loop reads
    both itself. Linux ends the process with this process.

    Args:
        folder: of the model.
        text_folder: of its tokenizer.
        progress: called on the loop with bytes of weights loaded and in total.
        bill: gets the phases of loading.
        await_kernels: waits, in a thread, for kernels that are being compiled.
        machines: where the ranks are; None: all on this machine.

    Attributes:
        grammars: compiles grammars where masks are made of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        text_folder: Path,
        progress: Callable[[int, int], None],
        bill: StartupBill,
        await_kernels: Callable[[], None],
        machines: Machines | None = None,
    ):
        self._heartbeat = RemoteHeartbeat()
        self.heartbeat: Heartbeat = self._heartbeat
        self.grammars = RemoteGrammars(self._tell)
        self._config = config
        self._folders = folder, text_folder
        self._progress = progress
        self._bill = bill
        self._await_kernels = await_kernels
        self._machines = machines
        self._results = AwaitedResults()
        self.on_death = self._results.on_death
        self._process: PeerProcess | None = None
        self._monitor: Monitor | None = None
        self._plans: SocketLink | None = None
        self._control: SocketLink | None = None
        self._started: asyncio.Future[EngineLimits] | None = None
        self._kernels: asyncio.Task[None] | None = None
        self._lost = False  # or given up: nothing more is expected of the process

    async def start(self) -> EngineLimits:
        loop = asyncio.get_running_loop()
        started: asyncio.Future[EngineLimits] = loop.create_future()
        self._started = started
        self._start_process(loop)
        try:
            return await started
        except BaseException:
            self._give_up()
            raise

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        if self._results.expect(on_result):
            assert self._plans is not None, "plans come once it has started"
            self._plans.send(plan)

    def flush(self) -> None:
        if self._plans is not None:
            self._plans.send(FLUSH)

    def abandon(self) -> None:
        if self._process is not None:
            self._process.print_stacks()
        self._lost = True

    async def close(self) -> None:
        process, loop = self._process, asyncio.get_running_loop()
        if process is None or self._plans is None:
            return
        process.closing = True
        ended = asyncio.Event()
        loop.add_reader(process.pidfd, ended.set)
        try:
            if not self._lost:
                self._plans.finish()
                await _wait(ended, CLOSE_SECONDS)
                if not ended.is_set():
                    log.error("a step has not ended: its process is killed")
            process.kill()
            await _wait(ended, KILL_SECONDS)
        finally:
            loop.remove_reader(process.pidfd)
            self._release(process)

    def _start_process(self, loop: asyncio.AbstractEventLoop) -> None:
        """
        Raises:
            ModelError: this system has no such processes.
        """
        plans, their_plans = socket.socketpair()
        control, their_control = socket.socketpair()
        with their_plans, their_control:
            fds = their_plans.fileno(), their_control.fileno()
            folder, text_folder = map(str, self._folders)
            level = log.getEffectiveLevel()
            settings = ExecutorSettings(
                self._config, folder, text_folder, *fds, level, self._machines
            )
            try:
                process = start_peer(0, "asyncllm.executor.process.main", settings, fds)
            except BaseException as error:
                plans.close()
                control.close()
                if isinstance(error, NotImplementedError):
                    raise ModelError(str(error), param="executor") from None
                raise
        self._process = self._heartbeat.process = process
        self._plans = SocketLink(loop, plans, self._results.arrived)
        self._control = SocketLink(loop, control, self._on_report)

        def on_lost(_rank: int, how: str) -> None:
            with suppress(RuntimeError):  # the program closed the loop, and not its engine
                loop.call_soon_threadsafe(self._on_lost, how)

        self._monitor = Monitor([process], on_lost)

    def _release(self, process: PeerProcess) -> None:
        """Leave nothing behind; the process has ended, or is killed."""
        if self._monitor is not None:
            self._monitor.close()
        close_peers([process], 0.0)
        for link in (self._plans, self._control):
            if link is not None:
                link.close()
        if self._kernels is not None:
            self._kernels.cancel()
        self._process = self._plans = self._control = self._monitor = None
        self._results.close()
        self.grammars.close()

    def _tell(self, message: ToProcess) -> None:
        if self._control is not None:
            self._control.send(encode(message))

    # -- what comes from the process -------------------------------------------------------------

    def _on_report(self, message: bytes) -> None:
        report = decode_from_process(message)
        if isinstance(report, Compiled | Refused):
            self.grammars.answered(report)
        elif isinstance(report, Failed):
            self._end(report.loading_error(), report.serving_error())
        elif isinstance(report, KernelsWanted):
            self._kernels = asyncio.ensure_future(self._announce_kernels())
        elif isinstance(report, Progress):
            try:
                self._progress(report.done, report.total)
            except Exception as error:  # the caller's, as when a thread loads
                self._end(error, EngineDead("loading failed"))
        elif isinstance(report, Started):
            self._bill.items.extend(report.bill)
            self._settle(report.limits)

    async def _announce_kernels(self) -> None:
        try:
            await run_in_daemon(self._await_kernels)
        except EngineDead as error:  # loading was abandoned
            self._end(error, error)
        else:
            self._tell(KernelsReady())

    def _on_lost(self, how: str) -> None:
        """It was killed or stopped, or ended by itself: then it may have said why."""
        if self._control is not None:
            self._control.read()
        self._end(EngineDead(how), EngineDead(how))

    # -- its end ---------------------------------------------------------------------------------

    def _end(self, loading_error: Exception, serving_error: EngineDead) -> None:
        """Nothing more comes from the process: tell whoever waits for something."""
        if self._lost:
            return
        self._give_up()
        if self._started is not None and not self._started.done():
            self._started.set_exception(loading_error)
            return
        log.error("the executor died: %s", serving_error.message)
        self.grammars.close(serving_error)
        self._results.die(serving_error)

    def _settle(self, limits: EngineLimits) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_result(limits)

    def _give_up(self) -> None:
        self._lost = True
        if self._process is not None:
            self._process.closing = True
            self._process.kill()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
