"""Sums of a prompt's final hidden states: made on the device, read on the host a step later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.step.inputs import PooledRow
from asyncllm.wire.messages import PooledPrompt


class PooledSums:
    """One for each row of which hidden states are wanted.

    Args:
        final: from hidden states as the model gives them to those after its last norm.
        hidden: [n, hidden_size] of the positions that are wanted, row after row.
        rows: whose they are.

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
        """The sums as messages; ``packed`` is what was copied to the host."""
        for row, total in zip(self._rows, packed.astype("<f4", copy=False), strict=True):
            yield PooledPrompt(row.row, row.start, row.end, total.tobytes())
