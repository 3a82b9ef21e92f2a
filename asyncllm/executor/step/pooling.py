"""Sums of a prompt's final hidden states, computed on the device and read on the host later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.step.inputs import PooledRow
from asyncllm.wire.messages import PooledPrompt


class PooledSums:
    """The sum of each pooled row's hidden states.

    Args:
        final: the model's last norm.
        hidden: [n, hidden_size] of the pooled positions, row after row.

    Attributes:
        packed: float32 [rows, hidden_size] on the device.
    """

    def __init__(
        self, final: Callable[[Tensor], Tensor], hidden: Tensor, rows: tuple[PooledRow, ...]
    ):
        self._rows = rows
        states = final(hidden)
        if len(rows) == len(states):
            self.packed = states.float()
        else:
            parts = states.split([row.end - row.start for row in rows])
            self.packed = torch.stack([part.sum(0, dtype=torch.float32) for part in parts])

    def unpack(self, packed: np.ndarray) -> Iterator[PooledPrompt]:
        """The sums as messages, from a copy of ``packed`` on the host."""
        for row, total in zip(self._rows, packed.astype("<f4", copy=False), strict=True):
            yield PooledPrompt(row.row, row.start, row.end, total.tobytes())
