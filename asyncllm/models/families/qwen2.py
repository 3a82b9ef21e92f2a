"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.qwen import Qwen2Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.parameter import Placement


class Qwen2ForCausalLM(DecoderLM[Qwen2Config]):
    """Llama with biases on queries, keys and values only."""

    def make_attention(
        self, config: Qwen2Config, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place, qkv_bias=True)
