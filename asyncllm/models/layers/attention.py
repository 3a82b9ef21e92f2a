"""The attention of the families with rotary positions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from asyncllm.attention.base import AttentionSpec, ForwardBatch
from asyncllm.models.layers.linear import FusedLinear, Linear
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.rotary import Rotation, rotate


class Attention(nn.Module):
    """Projections, positions and attention: [tokens, hidden] -> [tokens, hidden].

    Args:
        head_norm: makes the norm of each query and each key head, when the family has them.
        fused_on_disk: the checkpoint, too, has queries, keys and values in one matrix.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        place: Placement,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        head_norm: Callable[[], nn.Module] | None = None,
        fused_on_disk: bool = False,
    ):
        super().__init__()
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        self.spec = spec
        self.sizes = [query_size, kv_size, kv_size]
        apart = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        outputs = {"qkv_proj": sum(self.sizes)} if fused_on_disk else apart
        self.qkv_proj = FusedLinear(hidden_size, outputs, place, bias=qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, place, bias=out_bias)
        self.q_norm = None if head_norm is None else head_norm()
        self.k_norm = None if head_norm is None else head_norm()

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        projected = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = batch.attend(self.spec, rotate(q, rotation), rotate(k, rotation), v)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
