"""Llama 2 and 3, Seed-OSS, and Qwen2 and 2.5."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.llama import LlamaConfig, SeedOssConfig
from asyncllm.models.config.qwen import Qwen2Config
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


class Qwen2ForCausalLM(DecoderLM[Qwen2Config]):
    """Llama with biases on queries, keys and values only."""

    def make_attention(
        self, config: Qwen2Config, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place, qkv_bias=True)
