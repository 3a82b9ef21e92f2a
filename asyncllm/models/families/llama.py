"""Llama 2 and 3, and Seed-OSS."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.llama import LlamaConfig, SeedOssConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class LlamaForCausalLM(DecoderLM[LlamaConfig]):
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def make_mlp(self, config: LlamaConfig, layer: int, place: Placement) -> nn.Module:
        size, bias = config.intermediate_size, config.mlp_bias
        return GatedMLP(config.hidden_size, size, config.activation, place, bias=bias)


class SeedOssForCausalLM(DecoderLM[SeedOssConfig]):
    """Llama with separate switches for the biases of attention."""

    def make_attention(
        self, config: SeedOssConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        qkv, out = config.attention_bias, config.attention_out_bias
        return self._attention(config, spec, place, qkv_bias=qkv, out_bias=out)

    def make_mlp(self, config: SeedOssConfig, layer: int, place: Placement) -> nn.Module:
        size, bias = config.intermediate_size, config.mlp_bias
        return GatedMLP(config.hidden_size, size, config.activation, place, bias=bias)
