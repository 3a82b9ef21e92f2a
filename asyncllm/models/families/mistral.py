"""Mistral 7B and its kin: Ministral, Mistral 3, Ministral 3; with experts, Mixtral."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec, Norm
from asyncllm.models.config.mistral import Ministral3Config, MistralConfig, MixtralConfig
from asyncllm.models.decoder import DecoderLM, MoeDecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.parameter import Placement


class MistralForCausalLM(DecoderLM[MistralConfig]):
    """Llama without biases; if config.json has a window, every layer slides."""

    def make_attention(
        self, config: MistralConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place)


class ScaledQueryAttention(Attention):
    """Attention whose queries grow with their position.

    Attributes:
        scales: float32 [max_length]; the factor of queries at each position. None: all are one.
    """

    scales: Tensor | None = None

    def project(self, x: Tensor, batch: ForwardBatch, norm: Norm | None) -> Tensor:
        qkv = super().project(x, batch, norm)
        if self.scales is not None:
            factors = self.scales.index_select(0, batch.positions)
            qkv[:, : self.spec.num_heads * self.spec.head_dim].mul_(factors.unsqueeze(1))
        return qkv


class Ministral3ForCausalLM(DecoderLM[Ministral3Config]):
    """Mistral with queries that are scaled beyond the context it was first trained for."""

    attention_type = ScaledQueryAttention

    def __init__(self, config: Ministral3Config, place: Placement, max_length: int | None = None):
        super().__init__(config, place, max_length)
        scales = _query_scales(config, max_length or config.context_length, place.device)
        for module in self.modules():
            if isinstance(module, ScaledQueryAttention):
                module.scales = scales

    def make_attention(
        self, config: Ministral3Config, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place)


def _query_scales(config: Ministral3Config, max_length: int, device: torch.device) -> Tensor | None:
    """See ``ScaledQueryAttention.scales``."""
    if config.query_scaling is None or max_length <= config.query_scaling[1]:
        return None
    if device.type == "meta":
        return torch.empty(max_length, dtype=torch.float32, device=device)
    slope, span = config.query_scaling
    positions = torch.arange(max_length, dtype=torch.float32, device=device)
    return 1 + slope * torch.log1p(torch.floor(positions / span))


class MixtralForCausalLM(MoeDecoderLM[MixtralConfig]):
    """Mistral with experts in every layer."""

    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
