"""Qwen2 and Qwen3 with a mixture of experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.qwen import Qwen2MoeConfig, Qwen3MoeConfig
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.parameter import Placement


class Qwen2MoeForCausalLM(MoeDecoderLM[Qwen2MoeConfig]):
    """Qwen2 with experts, and one that all tokens go through, behind a gate."""

    has_shared_gate = True
    renamed: ClassVar[dict[str, str]] = {".mlp.shared_expert_gate.": ".mlp.gate.shared_gate."}

    def make_attention(
        self, config: Qwen2MoeConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        return self._attention(config, spec, place, qkv_bias=config.qkv_bias)


class Qwen3MoeForCausalLM(MoeDecoderLM[Qwen3MoeConfig]):
    """Qwen3 with experts."""

    has_head_norms = True
