"""Llama 2 and 3."""

from __future__ import annotations

from torch import nn

from asyncllm.models.config.llama import LlamaConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class LlamaForCausalLM(DecoderLM[LlamaConfig]):
    """Grouped-query attention with rotary positions, and a gated MLP."""

    def make_mlp(self, config: LlamaConfig, layer: int, place: Placement) -> nn.Module:
        size, bias = config.intermediate_size, config.mlp_bias
        return GatedMLP(config.hidden_size, size, config.activation, place, bias=bias)
