"""The seam between models and attention kernels.

A model describes each of its attention layers once (``AttentionSpec``) and, in a step, calls
``batch.attend(spec, q, k, v)``. A backend turns the step's rows into a plan shared by all layers
and reads and writes the paged KV cache. Nothing else knows how pages are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention computes.

    Attributes:
        layer: index of the layer, and so of its K and V pages.
        num_heads, num_kv_heads, head_dim: of this layer; ``num_heads % num_kv_heads == 0``.
        scale: factor of the dot products.
        window: None, or how many positions (its own included) a query sees.
        softcap: None, or c in ``c * tanh(score / c)``, applied after ``scale``.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over the paged KV cache."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> Any:
        """Prepare one step.

        Args:
            rows: int32 [n, 3] of (slot, start, q_len) on the host: row i brings the tokens at
                positions start .. start+q_len-1 of the sequence in that slot. Tokens of all rows
                are concatenated in this order in q, k and v.
            block_table: int32 [slots, max_pages] on the device; page numbers by slot.

        Returns:
            What ``forward`` needs for this step; the same for every layer.
        """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, plan: Any) -> Tensor:
        """Write K and V to their pages, then attend.

        Args:
            q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim], positions
                already encoded. May be strided views whose last dimension is contiguous.

        Returns:
            [tokens, num_heads, head_dim], same dtype as q.
        """


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it.

    Attributes:
        input_ids: int64 [tokens].
        positions: int64 [tokens], of each token in its own sequence.
        sample_rows: int64 [samples]; indices into tokens whose hidden state yields logits.
    """

    input_ids: Tensor
    positions: Tensor
    sample_rows: Tensor
    backend: AttentionBackend
    plan: Any

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``AttentionBackend.forward``."""
        return self.backend.forward(q, k, v, spec, self.plan)


class KVPages(Protocol):
    """The paged K and V storage of every layer, as attention backends see it."""

    page_size: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_pages, page_size, num_kv_heads, head_dim]."""


__all__ = ["AttentionBackend", "AttentionSpec", "ForwardBatch", "KVPages"]
