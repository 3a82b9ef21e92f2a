"""Processes of ranks, which rank 0 starts, and of replicas. Linux only."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import msgspec

from asyncllm.executor.team.peer_main import PRINT_STACKS, PeerArguments
from asyncllm.executor.team.status import LastOperation, PeerStatus, new_status, operation_of
from asyncllm.system.json_log import logs_json
from asyncllm.wire.heartbeat import Operation

logger = logging.getLogger(__name__)

#: SIGKILL is this quick, unless a driver does not let go of the process.
KILL_SECONDS = 10.0


class PeerProcess:
    """One peer, from its start to its end.

    It has a session of its own, so Ctrl-C in the terminal reaches only the parent, which drains.
    Linux kills it when the thread that made this object ends (``die_with``) and, as this does not
    see every end, when the parent process has ended (``die_at_end_of``). So make it in a thread
    that lives as long as the engine, or with ``start_peer``.
    """

    def __init__(
        self, rank: int, module: str, settings: object, fds: Collection[int] = (), *, name: str = ""
    ):
        """Start ``python -P -m module``, whose main begins with ``enter_team``.

        Args:
            settings: what ``enter_team`` returns there; anything that msgspec encodes.
            fds: descriptors that the peer gets under the same numbers. They stay the caller's.
            name: what the log calls it; "rank N" by default.

        Raises:
            NotImplementedError: this is not Linux.
            OSError: there are too many processes or open files.
        """
        if sys.platform != "linux":
            raise NotImplementedError("processes of ranks and replicas need Linux")
        self.rank = rank
        self.name = name or f"rank {rank}"
        #: The end is asked for, so that it is no loss.
        self.closing = False
        self._last = LastOperation("", 0, 0.0)
        with ExitStack() as only_the_peers, ExitStack() as on_error:
            settings_fd = _memory_of(msgspec.msgpack.encode(settings))
            only_the_peers.callback(os.close, settings_fd)
            read_end, self._lifeline = os.pipe()
            only_the_peers.callback(os.close, read_end)
            on_error.callback(os.close, self._lifeline)
            status_fd = new_status()
            only_the_peers.callback(os.close, status_fd)
            status = PeerStatus(os.dup(status_fd))
            on_error.callback(status.close)
            inherited = settings_fd, status_fd, read_end
            arguments = PeerArguments(os.getpid(), rank, logs_json(), *inherited)
            self._process = subprocess.Popen(
                # -P: the current folder may hold anything.
                [sys.executable, "-P", "-m", module, *map(str, map(int, arguments))],
                stdin=subprocess.DEVNULL,
                pass_fds=(*inherited, *fds),
                env={**os.environ, "PYTHONPATH": _python_path()},
                start_new_session=True,
            )
            on_error.callback(self._process.wait)
            on_error.callback(self._process.kill)
            #: Readable once the process has ended.
            self.pidfd = os.pidfd_open(self._process.pid)
            on_error.pop_all()
        self.pid = self._process.pid
        self._status: PeerStatus | None = status
        self._released = threading.Event()

    @property
    def exit_code(self) -> int | None:
        """As of ``subprocess``: minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def last_operation(self) -> LastOperation:
        """What the peer said last that it does; also after its end."""
        status = self._status  # another thread may release it
        return status.read() if status else self._last

    def operation(self) -> Operation:
        """What its worker does now."""
        return operation_of(self.last_operation())

    def is_stopped(self) -> bool:
        """Whether SIGSTOP or the like has stopped it. A debugger does not count."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def end(self, patience: float | None = None) -> str:
        """How it ended; waits for that, and kills it after ``patience`` seconds."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"

    def print_stacks(self) -> None:
        """Have it write the stacks of all its threads to stderr, even if it holds the GIL."""
        self._process.send_signal(PRINT_STACKS)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    def close(self, timeout: float) -> None:
        """See ``close_peers``."""
        close_peers([self], timeout)

    def _release(self) -> None:
        if self._status is None:
            return
        self._last = self._status.read()
        self._status = None  # its memory goes with the last reader
        os.close(self.pidfd)
        os.close(self._lifeline)
        self._released.set()


def start_peer(
    rank: int, module: str, settings: object, fds: Collection[int] = (), *, name: str = ""
) -> PeerProcess:
    """Make a ``PeerProcess`` that outlives the calling thread: one of its own is the parent.

    An event loop may be run by one thread after another.

    Raises:
        NotImplementedError, OSError: as ``PeerProcess``.
    """
    started: Future[PeerProcess] = Future()

    def be_parent() -> None:
        try:
            peer = PeerProcess(rank, module, settings, fds, name=name)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(peer)
        peer._released.wait()

    threading.Thread(target=be_parent, name="asyncllm-parent", daemon=True).start()
    return started.result()


def close_peers(peers: Sequence[PeerProcess], timeout: float) -> None:
    """Wait until all have ended; those that do not are killed.

    Nothing is left: no process, no descriptor. May be called again, but not by two threads at once.

    Args:
        timeout: seconds before that; with 0 they are not expected to end by themselves. Tell the
            peers to end before, by closing their ring.
    """
    for peer in peers:
        peer.closing = True
    left = _wait([peer for peer in peers if peer.exit_code is None], timeout)
    for peer in left:
        if timeout > 0:
            logger.warning("%s (process %d) does not end: SIGKILL", peer.name, peer.pid)
        peer.kill()
    left = _wait(left, KILL_SECONDS)
    for peer in left:
        logger.error("%s (process %d) is stuck in the kernel", peer.name, peer.pid)
    for peer in peers:
        peer._release()


def _wait(peers: Sequence[PeerProcess], timeout: float) -> list[PeerProcess]:
    """Those that have not ended in time."""
    deadline = time.monotonic() + timeout
    left = {peer.pidfd: peer for peer in peers}
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left and (ended := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for fd, _ in ended:
            poll.unregister(fd)
            left.pop(fd).end()
    return list(left.values())


def _memory_of(data: bytes) -> int:
    """A descriptor of memory with these bytes."""
    fd = os.memfd_create("asyncllm-settings")
    os.pwrite(fd, data, 0)
    return fd


def _python_path() -> str:
    """So that the peer imports this very package, wherever it runs."""
    package = str(Path(__file__).parents[3])
    given = os.environ.get("PYTHONPATH")
    return f"{package}{os.pathsep}{given}" if given else package
