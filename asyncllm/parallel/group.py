"""Ranks that are joined by PyTorch's process groups: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from asyncllm.parallel.ranks import LOADING, RanksBroken, RanksDisagree

#: How long a rank waits for the others in a step: ranks that are lost are noticed otherwise.
_STEP: Final = timedelta(hours=1)
#: How long it waits until all have joined, which nothing interrupts. All have started before.
_JOIN: Final = timedelta(seconds=20)
#: How long a rank that failed a step waits for the others to fail it.
_AGREE_SECONDS: Final = timedelta(seconds=5)


class GroupRanks:
    """``Ranks`` by process groups that belong to nobody else.

    Args:
        tensors: a backend of PyTorch's for tensors of the model's device.
        host: another, for numbers in host memory.
        abort: ends the collectives that wait for other ranks, from any thread; there can be no
            others. Those in host memory end when the processes of the others do.
    """

    # PyTorch's stubs leave out the collectives of backends.
    def __init__(
        self,
        rank: int,
        size: int,
        tensors: Any,
        host: Any,
        abort: Callable[[], None] = lambda: None,
    ):
        self.abort = abort
        self.rank = rank
        self.size = size
        self.calls = 0
        self._tensors = tensors
        self._host = host

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        with self._call():
            self._tensors.allreduce([x]).wait()
        return x if residual is None else residual.add_(x)

    def gather(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        parts = x.new_empty(self.size * rows, columns)
        with self._call():
            self._tensors._allgather_base(parts, x.contiguous()).wait()
        return parts.view(self.size, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        with self._call():
            self._tensors.broadcast([x], options).wait()

    def least(self, value: int, seconds: float = LOADING) -> int:
        found, *calls = self._least([value, self.calls, -self.calls], timedelta(seconds=seconds))
        if calls != [self.calls, -self.calls]:
            raise RanksBroken(f"rank {self.rank} has done other work than others")
        return found

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
        self._tensors = self._host = None
        self.abort = lambda: None

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
    if device.type != "cuda":
        return GroupRanks(rank, size, _gloo(PrefixStore("tensors", store), rank, size), host)
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    nccl = ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, options)
    return GroupRanks(rank, size, nccl, host, nccl.abort)


def _gloo(store: Store, rank: int, size: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # All ranks are on this machine: nothing is open to others.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = _JOIN
    group = ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(_STEP)
    return group
