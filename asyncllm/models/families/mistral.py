"""Mistral 7B and its kin."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import MistralConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.parameter import Placement


class MistralForCausalLM(DecoderLM[MistralConfig]):
    """Llama without biases; if config.json has a window, every layer slides."""

    def make_attention(
        self, config: MistralConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place)
