"""Gemma 2."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Gemma2Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.norm import GemmaRMSNorm
from asyncllm.models.layers.parameter import Placement


class Gemma2ForCausalLM(DecoderLM[Gemma2Config]):
    """Every other layer slides; attention scores and logits are soft-capped."""

    norm_type = GemmaRMSNorm

    def make_layer(self, config: Gemma2Config, spec: AttentionSpec, place: Placement) -> nn.Module:
        hidden, bias = config.hidden_size, config.attention_bias
        attention = Attention(spec, hidden, place, qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(hidden, config.intermediate_size, config.activation, place)
        return SandwichNormBlock(attention, mlp, config, place)
