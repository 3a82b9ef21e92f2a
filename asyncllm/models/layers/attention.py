"""The attention of the families with rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.errors import ModelError
from asyncllm.kernels.activation import sigmoid_gated
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, Norm
from asyncllm.models.layers.linear import FusedLinear, Kept, RowLinear, rows_by_part
from asyncllm.models.layers.norm import RMSNorm, SharedRMSNorm
from asyncllm.models.layers.parameter import Packed, Placement
from asyncllm.models.quant.place import Place
from asyncllm.parallel.ranks import Ranks


class HeadShare(NamedTuple):
    """One rank's heads of a layer.

    Attributes:
        spec: of them.
        queries, keys: their features; those of values are as those of keys.
    """

    spec: AttentionSpec
    queries: Kept
    keys: Kept

    @classmethod
    def of(cls, spec: AttentionSpec, ranks: Ranks) -> HeadShare:
        """This rank's share of a layer's heads.

        With fewer key and value heads than ranks, several ranks have the same one.

        Raises:
            ModelError: they cannot be divided evenly.
        """
        heads, size = spec.num_kv_heads, spec.head_dim
        queries = Kept.share(spec.num_heads, "num_attention_heads", ranks, unit=size)
        if heads >= ranks.size:
            keys = Kept.share(heads, "num_key_value_heads", ranks, unit=size)
        elif ranks.size % heads:
            raise ModelError(
                f"tp {ranks.size} is not a multiple of num_key_value_heads {heads}", param="tp"
            )
        else:
            first = ranks.rank * heads // ranks.size * size
            keys = Kept(heads * size, (slice(first, first + size),))
        own = replace(spec, num_heads=queries.size // size, num_kv_heads=keys.size // size)
        return cls(own, queries, keys)


class HeadSinks(Packed):
    """The sinks of this rank's query heads: see ``AttentionSpec.has_sinks``."""

    def __init__(self, spec: AttentionSpec, place: Placement):
        super().__init__()
        self.kept = Kept.share(spec.num_heads, "num_attention_heads", place.ranks)
        self.scores = place.empty(self.kept.size)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "sinks", self.kept.place(0, self.scores)


class Attention(nn.Module):
    """Projections, positions and attention: [tokens, hidden] -> [needed tokens, hidden].

    Attributes:
        normalizes_values: see ``HeadEncoding``.

    Args:
        spec: of all ranks' heads.
        head_norm: makes a norm of a size; for the query and key heads, if the family has them.
        has_gate: what each query head attends to is multiplied by the sigmoid of a gate. On disk,
            ``q_proj`` has each head's query, then its gate; here, all gates come first.
        fused_on_disk: queries, keys and values are one matrix in the checkpoint too.
        input_size: elements of x, if not ``hidden_size``.
        neighbours: leading elements of a head whose pairs are side by side in the checkpoint. They
            are loaded in our order, which is the same to attention: queries and keys agree.
    """

    normalizes_values = False

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[int], RMSNorm] | None = None,
        has_gate: bool = False,
        fused_on_disk: bool = False,
        input_size: int | None = None,
        neighbours: int = 0,
    ):
        super().__init__()
        self.head_sinks = HeadSinks(spec, place) if spec.has_sinks else None
        spec, queries, keys = HeadShare.of(spec, place.ranks)
        self.spec = spec
        parts = zip(
            ("q_proj", "k_proj", "v_proj"), (queries, keys, keys), spec.projected_heads, strict=True
        )
        apart = {name: kept for name, kept, heads in parts if heads}
        outputs = {"qkv_proj": Kept.of(queries, keys, keys)} if fused_on_disk else apart
        orders = {}
        if neighbours:
            orders["q_proj"] = _pairs_apart(spec.num_heads, spec.head_dim, neighbours)
            orders["k_proj"] = _pairs_apart(spec.num_kv_heads, spec.head_dim, neighbours)
        self.gate_size = queries.size if has_gate else 0
        if has_gate:
            outputs["q_proj"] = queries.times(2)
            query, gate = rows_by_part(spec.num_heads, (spec.head_dim, spec.head_dim))
            orders["q_proj"] = torch.cat((gate, query))
        inputs = input_size or hidden_size
        self.qkv_proj = FusedLinear(inputs, outputs, place, bias=qkv_bias, orders=orders)
        self.o_proj = RowLinear(queries, hidden_size, place, bias=out_bias)
        self.q_norm: RMSNorm | None = None if head_norm is None else head_norm(spec.head_dim)
        has_keys = spec.shares is None
        self.k_norm = head_norm(spec.head_dim) if head_norm is not None and has_keys else None

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
        projected = self.project(x, batch, norm)
        gates, qkv = projected[:, : self.gate_size], projected[:, self.gate_size :]
        sinks = None if self.head_sinks is None else self.head_sinks.scores
        encoding = HeadEncoding(*self.head_norms(), rope, sinks, self.normalizes_values)
        attended = batch.attend(self.spec, qkv, encoding)
        if self.gate_size:
            attended = sigmoid_gated(attended, batch.needed(gates))
        out: Tensor = self.o_proj(attended, residual=residual)
        return out

    def project(self, x: Tensor, batch: ForwardBatch, norm: Norm | None) -> Tensor:
        """Gates, if there are any, and queries, keys and values of x before their encoding."""
        qkv: Tensor = self.qkv_proj(x, norm=norm)
        return qkv

    def head_norms(self) -> tuple[Norm | None, Norm | None]:
        """The norms of each query head and each key head."""
        norms = self.q_norm, self.k_norm
        query, key = (None if norm is None else norm.norm for norm in norms)
        return query, key


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
        _, queries, keys = HeadShare.of(spec, place.ranks)
        self.q_norm = SharedRMSNorm(queries, head_norm, place.ranks)
        self.k_norm = SharedRMSNorm(keys, head_norm, place.ranks)

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
