"""One decoder layer: attention and feed-forward around the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.models.layers.norm import LayerNorm, RMSNorm

#: Makes a norm of the residual stream.
MakeNorm = Callable[[], RMSNorm | LayerNorm]


class PreNormBlock(nn.Module):
    """A norm before attention and one before the MLP.

    Norms and residual sums are arguments of the projections next to them, which may fuse them into
    one kernel. So the residual stream x, [tokens, hidden], is changed in place.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm):
        super().__init__()
        self.input_layernorm = make_norm()
        self.self_attn = attention
        self.post_attention_layernorm = make_norm()
        self.mlp = mlp

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        residual = batch.needed(x)
        x, norm = self.input_layernorm.before_projection(x)
        residual = self.self_attn(x, rope, batch, norm=norm, residual=residual)
        x, norm = self.post_attention_layernorm.before_projection(residual)
        out: Tensor = self.mlp(x, norm=norm, residual=residual)
        return out


class ScaledResidualBlock(PreNormBlock):
    """Granite's: a norm before attention and MLP, and a factor of what they add."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm, *, factor: float):
        super().__init__(attention, mlp, make_norm)
        self.factor = factor

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        residual = batch.needed(x)
        x, norm = self.input_layernorm.before_projection(x)
        attended = self.self_attn(x, rope, batch, norm=norm)
        residual = torch.add(residual, attended, alpha=self.factor)
        x, norm = self.post_attention_layernorm.before_projection(residual)
        return torch.add(residual, self.mlp(x, norm=norm), alpha=self.factor)


class PostNormBlock(nn.Module):
    """OLMo 2's: a norm after attention and one after the MLP, before the residual sum."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm):
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = make_norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = make_norm()

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        attended = self.post_attention_layernorm(self.self_attn(x, rope, batch))
        x = batch.needed(x) + attended
        out: Tensor = x + self.post_feedforward_layernorm(self.mlp(x))
        return out


class SandwichNormBlock(nn.Module):
    """Gemma's: a norm before and one after attention, and likewise around the MLP."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm):
        super().__init__()
        self.input_layernorm = make_norm()
        self.self_attn = attention
        self.post_attention_layernorm = make_norm()
        self.pre_feedforward_layernorm = make_norm()
        self.mlp = mlp
        self.post_feedforward_layernorm = make_norm()

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        normed, norm = self.input_layernorm.before_projection(x)
        attended = self.self_attn(normed, rope, batch, norm=norm)
        x = batch.needed(x) + self.post_attention_layernorm(attended)
        normed, norm = self.pre_feedforward_layernorm.before_projection(x)
        fed = self.mlp(normed, norm=norm)
        out: Tensor = x + self.post_feedforward_layernorm(fed)
        return out
