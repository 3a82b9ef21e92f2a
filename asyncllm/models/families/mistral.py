"""Mistral 7B and its kin."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import MistralConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class MistralForCausalLM(DecoderLM[MistralConfig]):
    """Llama without biases; where config.json has a window, every layer slides."""

    def make_layer(self, config: MistralConfig, spec: AttentionSpec, place: Placement) -> nn.Module:
        attention = Attention(spec, config.hidden_size, place)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, place)
        return PreNormBlock(attention, mlp, config, place)
