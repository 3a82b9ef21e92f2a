"""Llama 2 and 3."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import LlamaConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class LlamaForCausalLM(DecoderLM[LlamaConfig]):
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def make_layer(self, config: LlamaConfig, spec: AttentionSpec, place: Placement) -> nn.Module:
        hidden, bias = config.hidden_size, config.attention_bias
        attention = Attention(spec, hidden, place, qkv_bias=bias, out_bias=bias)
        mlp = GatedMLP(
            hidden, config.intermediate_size, config.activation, place, bias=config.mlp_bias
        )
        return PreNormBlock(attention, mlp, config, place)
