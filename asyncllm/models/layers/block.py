"""One decoder layer: attention and feed-forward around the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.models.config import DecoderConfig
from asyncllm.models.layers.norm import GemmaRMSNorm, RMSNorm
from asyncllm.models.layers.parameter import Placement


class PreNormBlock(nn.Module):
    """A norm before attention and one before the MLP.

    Norms and residual sums are arguments of the projections next to them, which may fuse them into
    one kernel. So the residual stream x, [tokens, hidden], is changed in place.
    """

    norm_type: type[RMSNorm] = RMSNorm

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, config: DecoderConfig, place: Placement
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = self.norm_type(size, eps, place)
        self.self_attn = attention
        self.post_attention_layernorm = self.norm_type(size, eps, place)
        self.mlp = mlp

    def forward(self, x: Tensor, rope: Tensor, batch: ForwardBatch) -> Tensor:
        norm, residual = self.input_layernorm.norm, batch.needed(x)
        x = self.self_attn(x, rope, batch, norm=norm, residual=residual)
        out: Tensor = self.mlp(x, norm=self.post_attention_layernorm.norm, residual=x)
        return out


class SandwichNormBlock(PreNormBlock):
    """Gemma's: a norm before and one after attention, and likewise around the MLP."""

    norm_type = GemmaRMSNorm

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, config: DecoderConfig, place: Placement
    ):
        super().__init__(attention, mlp, config, place)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = self.norm_type(size, eps, place)
        self.post_feedforward_layernorm = self.norm_type(size, eps, place)

    def forward(self, x: Tensor, rope: Tensor, batch: ForwardBatch) -> Tensor:
        attended = self.self_attn(x, rope, batch, norm=self.input_layernorm.norm)
        x = batch.needed(x) + self.post_attention_layernorm(attended)
        fed = self.mlp(x, norm=self.pre_feedforward_layernorm.norm)
        out: Tensor = x + self.post_feedforward_layernorm(fed)
        return out
