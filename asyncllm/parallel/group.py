"""Ranks that are joined by PyTorch's process groups: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
)

from asyncllm.kernels.support import obstacle
from asyncllm.parallel.collectives import Collectives, GroupCollectives
from asyncllm.parallel.ranks import LOADING, RanksBroken, RanksDisagree

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
        host: a backend of PyTorch's for numbers in host memory. Its collectives end when the
            processes of other ranks do.
    """

    # PyTorch's stubs leave out the collectives of backends.
    def __init__(self, rank: int, size: int, tensors: Collectives, host: Any):
        self.rank = rank
        self.size = size
        self.calls = 0
        self._tensors = tensors
        self._host = host

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
        """End the collectives of tensors that wait for other ranks, from any thread."""
        self._tensors.abort()

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


def open_store(file: int, size: int) -> Store:
    """A store in an open file without a name, in which ranks find each other.

    Args:
        file: a file descriptor, of the same memfd in every rank's process; open until the ranks
            are closed.
    """
    return FileStore(f"/proc/{os.getpid()}/fd/{file}", size)


def join(store: Store, rank: int, size: int, device: torch.device) -> GroupRanks:
    """Find the other ranks, which must have started, too.

    Args:
        store: shared by the ranks of this model alone.

    Raises:
        RanksBroken: they do not come.
    """
    store.set_timeout(_JOIN)
    try:
        return _join(store, rank, size, device)
    except RuntimeError as error:
        reason = str(error)
    # Neither this error nor its cause may keep the store: see ``GroupRanks.close``.
    del store
    raise RanksBroken(f"rank {rank} does not find the others: {reason}")


def _join(store: Store, rank: int, size: int, device: torch.device) -> GroupRanks:
    host = _gloo(PrefixStore("host", store), rank, size)
    on_tensors = PrefixStore("tensors", store)
    if device.type != "cuda":
        gloo = GroupCollectives(size, _gloo(on_tensors, rank, size))
        return GroupRanks(rank, size, gloo, host)
    from torch._C._distributed_c10d import ProcessGroupNCCL

    group = ProcessGroupNCCL(on_tensors, rank, size, ProcessGroupNCCL.Options())
    nccl = GroupCollectives(size, group, group.abort)
    exchange = partial(_exchange, PrefixStore("push", store), rank, size)
    push = _push(rank, size, device, nccl, exchange)
    if GroupRanks(rank, size, nccl, host).least(push is not None):
        assert push is not None
        return GroupRanks(rank, size, push, host)
    log.info("rank %d: sums go through NCCL alone", rank)
    return GroupRanks(rank, size, nccl, host)


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


def _gloo(store: Store, rank: int, size: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # All ranks are on this machine: nothing is open to others.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = _JOIN
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_STEP)
    return group
