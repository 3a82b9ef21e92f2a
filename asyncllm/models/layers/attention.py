"""The attention of the families with rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, Norm
from asyncllm.models.layers.linear import FusedLinear, Linear
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement


class Attention(nn.Module):
    """Projections, positions and attention: [tokens, hidden] -> [needed tokens, hidden].

    Args:
        head_norm: makes a norm of a size; for the query and key heads, if the family has them.
        fused_on_disk: queries, keys and values are one matrix in the checkpoint too.
        neighbours: leading elements of a head whose pairs are side by side in the checkpoint. They
            are loaded in our order, which is the same to attention: queries and keys agree.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[int], RMSNorm] | None = None,
        fused_on_disk: bool = False,
        neighbours: int = 0,
    ):
        super().__init__()
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        self.spec = spec
        apart = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        outputs = {"qkv_proj": query_size + 2 * kv_size} if fused_on_disk else apart
        orders = {}
        if neighbours:
            orders["q_proj"] = _pairs_apart(spec.num_heads, spec.head_dim, neighbours)
            orders["k_proj"] = _pairs_apart(spec.num_kv_heads, spec.head_dim, neighbours)
        self.qkv_proj = FusedLinear(hidden_size, outputs, place, bias=qkv_bias, orders=orders)
        self.o_proj = Linear(query_size, hidden_size, place, bias=out_bias)
        self.q_norm = None if head_norm is None else head_norm(spec.head_dim)
        self.k_norm = None if head_norm is None else head_norm(spec.head_dim)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place.

        Args:
            rope: float32 [max_length, rotary_dim]; see ``HeadEncoding.rope``.
        """
        qkv = self.project(x, batch, norm)
        q_norm, k_norm = self.head_norms()
        attended = batch.attend(self.spec, qkv, HeadEncoding(q_norm, k_norm, rope))
        out: Tensor = self.o_proj(attended, residual=residual)
        return out

    def project(self, x: Tensor, batch: ForwardBatch, norm: Norm | None) -> Tensor:
        """Queries, keys and values of x before their encoding: ``AttentionBackend.forward``."""
        qkv: Tensor = self.qkv_proj(x, norm=norm)
        return qkv

    def head_norms(self) -> tuple[Norm | None, Norm | None]:
        """The norms of each query head and each key head."""
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return self.q_norm.norm, self.k_norm.norm


class WholeNormAttention(Attention):
    """OLMo's: one norm over all query heads, one over all key heads."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        *,
        head_norm: Callable[[int], RMSNorm] | None = None,
        **options: Any,
    ):
        super().__init__(spec, hidden_size, place, **options)
        assert head_norm is not None
        self.q_norm = head_norm(spec.num_heads * spec.head_dim)
        self.k_norm = head_norm(spec.num_kv_heads * spec.head_dim)

    def project(self, x: Tensor, batch: ForwardBatch, norm: Norm | None) -> Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        qkv = super().project(x, batch, norm)
        sizes = (len(self.q_norm.weight), len(self.k_norm.weight), len(self.k_norm.weight))
        q, k, _ = qkv.split_with_sizes(sizes, dim=1)
        q.copy_(self.q_norm(q))
        k.copy_(self.k_norm(k))
        return qkv

    def head_norms(self) -> tuple[Norm | None, Norm | None]:
        return None, None


def _pairs_apart(heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """int64 [heads * head_dim]: the row on disk of each row, where pairs are side by side."""
    within = torch.arange(head_dim)
    pairs = torch.arange(rotary_dim).view(-1, 2)
    within[:rotary_dim] = pairs.t().flatten()
    return (torch.arange(heads)[:, None] * head_dim + within).flatten()
