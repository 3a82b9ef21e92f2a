"""The attention of the families with rotary positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, Norm
from asyncllm.models.layers.linear import FusedLinear, Linear
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement


class Attention(nn.Module):
    """Projections, positions and attention: [tokens, hidden] -> [needed tokens, hidden].

    Args:
        head_norm: makes the norms of query and key heads, if the family has them.
        fused_on_disk: queries, keys and values are one matrix in the checkpoint too.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[], RMSNorm] | None = None,
        fused_on_disk: bool = False,
    ):
        super().__init__()
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        self.spec = spec
        apart = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        outputs = {"qkv_proj": query_size + 2 * kv_size} if fused_on_disk else apart
        self.qkv_proj = FusedLinear(hidden_size, outputs, place, bias=qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, place, bias=out_bias)
        self.q_norm = None if head_norm is None else head_norm()
        self.k_norm = None if head_norm is None else head_norm()

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place.

        Args:
            rope: float32 [max_length, rotary_dim]; see ``HeadEncoding.rope``.
        """
        encoding = HeadEncoding(
            None if self.q_norm is None else self.q_norm.norm,
            None if self.k_norm is None else self.k_norm.norm,
            rope,
        )
        attended = batch.attend(self.spec, self.qkv_proj(x, norm=norm), encoding)
        out: Tensor = self.o_proj(attended, residual=residual)
        return out
