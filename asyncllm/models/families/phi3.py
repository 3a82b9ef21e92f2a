"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Phi3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class Phi3ForCausalLM(DecoderLM[Phi3Config]):
    """Llama with fused projections in checkpoints; rotates part of a head in some models."""

    def make_layer(self, config: Phi3Config, spec: AttentionSpec, place: Placement) -> nn.Module:
        hidden, act = config.hidden_size, config.activation
        attention = Attention(spec, hidden, place, fused_on_disk=True)
        mlp = GatedMLP(hidden, config.intermediate_size, act, place, fused_on_disk=True)
        return PreNormBlock(attention, mlp, config, place)
