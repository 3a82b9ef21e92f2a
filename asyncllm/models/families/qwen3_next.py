"""Qwen3-Next, and Qwen3.5 to 3.8, dense and with experts: gated delta nets beside attention."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.qwen3_next import Qwen3NextConfig
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.delta_net import GatedDeltaNet
from asyncllm.models.layers.norm import GemmaRMSNorm
from asyncllm.models.layers.parameter import Placement


class Qwen3NextForCausalLM(MoeDecoderLM[Qwen3NextConfig]):
    """Layers that predict further tokens ("mtp") are not loaded."""

    norm_type = GemmaRMSNorm
    has_head_norms = True
    has_shared_gate = True
    renamed: ClassVar[dict[str, str]] = {
        ".linear_attn.": ".self_attn.",
        ".mlp.shared_expert_gate.": ".mlp.gate.shared_gate.",
    }
    #: See ``GatedDeltaNet``.
    grouped_on_disk = True

    def make_attention(
        self, config: Qwen3NextConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        bias = config.attention_bias
        return self._attention(config, spec, place, qkv_bias=bias, out_bias=bias, has_gate=True)

    def make_recurrent(
        self, config: Qwen3NextConfig, layer: int, place: Placement
    ) -> GatedDeltaNet:
        return GatedDeltaNet(config, layer, place, grouped_on_disk=self.grouped_on_disk)

    def checkpoint_name(self, name: str) -> str | None:
        return None if name.startswith("mtp.") else super().checkpoint_name(name)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """With matrices that are apart in the checkpoint."""

    grouped_on_disk = False
