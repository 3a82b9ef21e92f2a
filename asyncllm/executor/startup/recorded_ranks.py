"""Ranks whose launches are recorded, so that their kernels can be compiled ahead of time."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.triton.collectives.all_gather import rows_of_all
from asyncllm.kernels.triton.collectives.push import Channel
from asyncllm.parallel.push import is_gathered, most_programs, sum_for
from asyncllm.parallel.ranks import Apart


class RecordedRanks(Apart):
    """Rank 0, which launches what every rank launches as ``PushCollectives``.

    For ``recorded_launches``: nothing is added up. Each rank has kernels of its own.
    """

    def __init__(self, size: int):
        super().__init__(0, size)
        memories, counts, gives_up = (
            torch.zeros(count, dtype=dtype, device="meta")
            for count, dtype in (
                (size, torch.int64),
                (most_programs(size), torch.int32),
                (1, torch.int32),
            )
        )
        self._channels = [Channel(memories, counts, gives_up, rank) for rank in range(size)]

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        push = sum_for(x, self.size)
        if push is not None:
            for channel in self._channels:
                push(x, residual, channel)
        return super().sum(x, residual)

    def gather(self, x: Tensor) -> Tensor:
        if is_gathered(x, self.size):
            for channel in self._channels:
                rows_of_all(x.contiguous(), channel)
        return super().gather(x)
