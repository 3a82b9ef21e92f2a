"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Qwen2Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class Qwen2ForCausalLM(DecoderLM[Qwen2Config]):
    """Llama with biases on queries, keys and values alone."""

    def make_layer(self, config: Qwen2Config, spec: AttentionSpec, place: Placement) -> nn.Module:
        attention = Attention(spec, config.hidden_size, place, qkv_bias=True)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, place)
        return PreNormBlock(attention, mlp, config, place)
