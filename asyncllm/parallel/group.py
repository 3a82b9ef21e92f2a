"""Ranks that are joined by PyTorch's process groups: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from asyncllm.parallel.ranks import RanksBroken

#: How long a rank waits for the others. Ranks that are lost are noticed otherwise, within a second;
#: one that loads weights from a slow disk may be far behind.
_TIMEOUT: Final = timedelta(hours=1)


class GroupRanks:
    """``Ranks`` by process groups that belong to nobody else.

    Args:
        tensors: sums and gathers tensors of the model's device.
        host: for numbers in host memory.
    """

    def __init__(self, rank: int, size: int, tensors: Backend, host: Backend):
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

    def least(self, value: int) -> int:
        number = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        with self._call():
            self._host.allreduce([number], options).wait()
        return int(number)

    def abort(self) -> None:
        """End the collectives that wait for other ranks, in any thread; there can be no others."""
        self._tensors.abort()
        self._host.abort()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.calls += 1
        try:
            yield
        except RuntimeError as error:
            raise RanksBroken(f"rank {self.rank} lost the others: {error}") from error


def open_store(file: int, size: int) -> Store:
    """A store in an open file without a name, in which ranks find each other.

    Args:
        file: a file descriptor, of the same memfd in every rank's process.
    """
    return FileStore(f"/proc/{os.getpid()}/fd/{file}", size)


def join(store: Store, rank: int, size: int, device: torch.device) -> GroupRanks:
    """Find the other ranks; waits for them.

    Args:
        store: shared by the ranks of this model alone.
    """
    host = _gloo(PrefixStore("host", store), rank, size)
    if device.type != "cuda":
        return GroupRanks(rank, size, host, host)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    nccl = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    return GroupRanks(rank, size, nccl, host)


def _gloo(store: Store, rank: int, size: int) -> Backend:
    options = ProcessGroupGloo._Options()
    # All ranks are on this machine: nothing is open to others.
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = _TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)
