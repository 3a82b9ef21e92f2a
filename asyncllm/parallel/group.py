"""Ranks that are joined by PyTorch's process groups: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import base64
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from asyncllm.kernels.support import obstacle
from asyncllm.parallel.collectives import Collectives, GroupCollectives, OrderedSums
from asyncllm.parallel.ranks import LOADING, RanksBroken, RanksDisagree
from asyncllm.wire.tcp import listen


class Connections:
    """Sockets that were connected inside ``opening``, so that another thread can cut them."""

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Meanwhile this process connects what ``cut`` ends, and next to nothing else."""
        before = _sockets()
        yield
        opened = [file for name, file in _sockets().items() if name not in before]
        self._ends += filter(None, map(_connection, opened))

    def cut(self) -> None:
        """End them, as if the other side had; from any thread."""
        with self._lock:
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Forget them. May be called again."""
        with self._lock:
            for end in self._ends:
                end.close()
            self._ends.clear()


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by names that no other socket has."""
    found = {}
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as that of this folder
            name = os.readlink(f"/proc/self/fd/{file}")
            if name.startswith("socket:"):
                found[name] = int(file)
    return found


def _connection(file: int) -> socket.socket | None:
    """The TCP connection that a socket is, by a descriptor of its own; None if it is none."""
    try:
        end = socket.socket(fileno=os.dup(file))
    except OSError:  # closed meanwhile
        return None
    try:
        end.getpeername()
    except OSError:  # it listens, say
        end.close()
        return None
    if end.family in (socket.AF_INET, socket.AF_INET6):
        return end
    end.close()
    return None


log = logging.getLogger(__name__)

#: How long a rank waits for the others in a step: ranks that are lost are noticed otherwise.
_STEP: Final = timedelta(hours=1)
#: How long it waits until all have joined, which nothing interrupts. All have started before.
_JOIN: Final = timedelta(seconds=20)
#: How long a rank that failed a step waits for the others to fail it.
_AGREE_SECONDS: Final = timedelta(seconds=5)


class GroupRanks:
    """``Ranks`` by process groups that belong to nobody else.

    Args:
        tensors: for tensors of the model's device.
        host: a backend of PyTorch's for numbers in host memory.
        connections: those of gloo to other machines. Its collectives end when the processes of
            other ranks do, but nobody hears of those on a machine that is lost.
    """

    # PyTorch's stubs leave out the collectives of backends.
    def __init__(
        self, rank: int, size: int, tensors: Collectives, host: Any, connections: Connections
    ):
        self.rank = rank
        self.size = size
        self.calls = 0
        self._tensors = tensors
        self._host = host
        self._connections = connections

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        with self._call():
            return self._tensors.sum(x, residual)

    def gather(self, x: Tensor) -> Tensor:
        with self._call():
            return self._tensors.gather(x)

    def broadcast(self, x: Tensor) -> None:
        with self._call():
            self._tensors.broadcast(x)

    def least(self, value: int, seconds: float = LOADING) -> int:
        found, *calls = self._least([value, self.calls, -self.calls], timedelta(seconds=seconds))
        if calls != [self.calls, -self.calls]:
            raise RanksBroken(f"rank {self.rank} has done other work than others")
        return found

    def abort(self) -> None:
        """End the collectives that wait for other ranks, from any thread."""
        self._tensors.abort()
        self._connections.cut()

    @contextmanager
    def recording(self) -> Iterator[None]:
        calls = self.calls
        try:
            yield
        finally:
            self.calls = calls

    def agree(self, step: int) -> None:
        mine = [step, -step, self.calls, -self.calls]
        try:
            least = self._least(mine, _AGREE_SECONDS)
        except RanksBroken as error:
            raise RanksDisagree(f"step {step} failed on rank {self.rank} alone") from error
        if least != mine:
            where = f"on rank {self.rank} elsewhere than on others"
            raise RanksDisagree(f"step {step} failed {where}")

    def close(self) -> None:
        """Leave the groups, once nothing is under way.

        A store touches its file once more when it ends. So the file must be open until then: its
        number may be that of another file afterwards.
        """
        self._tensors.close()
        self._host = None
        self._connections.close()

    def _least(self, values: list[int], timeout: timedelta) -> list[int]:
        numbers = torch.tensor(values)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        options.timeout = timeout
        try:
            self._host.allreduce([numbers], options).wait()
        except RuntimeError as error:
            raise self._broken(error) from error
        least: list[int] = numbers.tolist()
        return least

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> RanksBroken:
        return RanksBroken(f"rank {self.rank} lost the others: {error}")


def open_store(where: int | tuple[str, int], size: int) -> Store:
    """A store in which ranks find each other.

    Args:
        where: on one machine a file descriptor, of the same memfd in every rank's process, open
            until the ranks are closed; on several the address of ``host_store``.
    """
    if isinstance(where, int):
        return FileStore(f"/proc/{os.getpid()}/fd/{where}", size)
    return TCPStore(*where, timeout=_JOIN, wait_for_workers=False)


def host_store(host: str) -> tuple[Store, tuple[str, int]]:
    """A store for ranks on several machines, and where others open it.

    Args:
        host: this machine's address; the store listens there alone.
    """
    listening = listen(host)
    port = listening.getsockname()[1]
    file = listening.detach()  # the store's own from here on
    store = TCPStore(host, port, None, True, _JOIN, wait_for_workers=False, master_listen_fd=file)
    return store, (host, port)


def join(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    host: str | None = None,
    *,
    ordered: bool = False,
) -> GroupRanks:
    """Find the other ranks, which must have started, too.

    Args:
        store: shared by the ranks of this model alone.
        host: this machine's address, if the ranks are on several machines.
        ordered: add up in the order of the ranks on GPUs, whatever the size.

    Raises:
        RanksBroken: they do not come.
    """
    store.set_timeout(_JOIN)
    try:
        return _join(store, rank, size, device, host, ordered)
    except RuntimeError as error:
        reason = str(error)
    # Neither this error nor its cause may keep the store: see ``GroupRanks.close``.
    del store
    raise RanksBroken(f"rank {rank} does not find the others: {reason}")


def _join(
    store: Store, rank: int, size: int, device: torch.device, address: str | None, ordered: bool
) -> GroupRanks:
    connections = Connections()
    host = _gloo(PrefixStore("host", store), rank, size, address, connections)
    on_tensors = PrefixStore("tensors", store)
    if device.type != "cuda":
        gloo = GroupCollectives(size, _gloo(on_tensors, rank, size, address, connections))
        return GroupRanks(rank, size, gloo, host, connections)
    from torch._C._distributed_c10d import ProcessGroupNCCL

    group = ProcessGroupNCCL(on_tensors, rank, size, ProcessGroupNCCL.Options())
    nccl: Collectives = GroupCollectives(size, group, group.abort)
    nccl = OrderedSums(size, nccl) if ordered else nccl
    if address is not None:  # other machines cannot reach this one's GPUs
        return GroupRanks(rank, size, nccl, host, connections)
    exchange = partial(_exchange, PrefixStore("push", store), rank, size)
    push = _push(rank, size, device, nccl, exchange)
    if GroupRanks(rank, size, nccl, host, connections).least(push is not None):
        assert push is not None
        return GroupRanks(rank, size, push, host, connections)
    log.info("rank %d: sums go through NCCL alone", rank)
    return GroupRanks(rank, size, nccl, host, connections)


def _push(
    rank: int,
    size: int,
    device: torch.device,
    larger: Collectives,
    exchange: Callable[[bytes], list[bytes]],
) -> Collectives | None:
    """See ``PushCollectives``; None, which is logged, where this rank cannot push."""
    if (reason := obstacle(device)) is None:
        from asyncllm.parallel.push import PushCollectives  # imports Triton

        try:
            return PushCollectives(rank, size, device, larger, exchange)
        except RuntimeError as error:
            reason = str(error)
    else:
        exchange(b"")
    log.info("rank %d cannot push sums to others: %s", rank, reason)
    return None


def _exchange(store: Store, rank: int, size: int, mine: bytes) -> list[bytes]:
    """What each rank gave, in their order."""
    store.set(str(rank), base64.b64encode(mine).decode() or "-")
    theirs = (store.get(str(other)) for other in range(size))
    return [b"" if value == b"-" else base64.b64decode(value) for value in theirs]


def _gloo(store: Store, rank: int, size: int, address: str | None, connections: Connections) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # If all ranks are on this machine, nothing is open to others.
    host = address or "127.0.0.1"
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = _JOIN
    with nullcontext() if address is None else connections.opening():
        group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_STEP)
    return group
