"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.phi3 import Phi3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class Phi3ForCausalLM(DecoderLM[Phi3Config]):
    """Llama with fused projections in checkpoints; rotates part of a head in some models."""

    def make_attention(
        self, config: Phi3Config, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place, fused_on_disk=True)

    def make_mlp(self, config: Phi3Config, layer: int, place: Placement) -> nn.Module:
        size = config.intermediate_size
        return GatedMLP(config.hidden_size, size, config.activation, place, fused_on_disk=True)
