"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.models.layers.parameter import Placement


class Embedding(nn.Module):
    """Rows of a table by id: int64 [tokens] -> [tokens, size].

    Ids are clamped to the table, as padding and failed rows may have invalid ones, and on a GPU an
    index out of range ends the process.

    Args:
        scale: factor of embeddings, rounded to their dtype first.
    """

    def __init__(self, rows: int, size: int, place: Placement, *, scale: float | None = None):
        super().__init__()
        self.weight = place.empty(rows, size)
        self.scale = None if scale is None else torch.tensor(scale, dtype=place.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids.clamp(0, self.weight.shape[0] - 1), self.weight)
        return x if self.scale is None else x * self.scale
