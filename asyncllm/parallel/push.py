"""Collectives of small tensors by our own kernels, which take half of NCCL's time or less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from asyncllm.kernels.triton.all_reduce import (
    Channel,
    place_bytes,
    programs_for,
    rows_of_all,
    sum_of_all,
)
from asyncllm.parallel.collectives import Collectives
from asyncllm.parallel.peer_memory import PeerMemory

#: Most programs of a launch, times the ranks that each pushes its 3 KiB to: 12 MiB to one. Larger
#: sums were not measured, and none of more than two ranks.
PUSHES: Final = 4096
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class PushCollectives:
    """Small tensors by pushing them, others as ``larger`` does.

    Made and used in one thread.

    Args:
        exchange: see ``PeerMemory``.

    Raises:
        RuntimeError: a GPU cannot write to another's memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        larger: Collectives,
        exchange: Callable[[bytes], list[bytes]],
    ):
        self._larger = larger
        self._size = size
        programs = most_programs(size)
        self._memory = PeerMemory(rank, place_bytes(programs, size), exchange)
        self._gives_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        memories = torch.tensor(self._memory.addresses, device=device)
        counts = torch.zeros(programs, dtype=torch.int32, device=device)
        self._channel = Channel(memories, counts, self._gives_up, rank)

    def sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if not is_small(x, x.numel(), self._size):
            return self._larger.sum(x, residual)
        return sum_of_all(x, residual, self._channel)

    def gather(self, x: Tensor) -> Tensor:
        if not is_small(x, x.shape[1], self._size):
            return self._larger.gather(x)
        return rows_of_all(x.contiguous(), self._channel)

    def broadcast(self, x: Tensor) -> None:
        self._larger.broadcast(x)

    def abort(self) -> None:
        self._gives_up.fill_(1)
        self._larger.abort()

    def close(self) -> None:
        self._memory.close()
        self._larger.close()


def most_programs(size: int) -> int:
    """Of the largest launch of so many ranks."""
    return PUSHES // (size - 1)


def is_small(x: Tensor, values: int, size: int) -> bool:
    """Whether so many ranks push x, of which so many values must fill whole words."""
    if x.dtype not in _DTYPES or values * x.itemsize % 4:
        return False
    return 0 < programs_for(x) <= most_programs(size)
