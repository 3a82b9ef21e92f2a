"""Qwen3-Next, and Qwen3.5 to 3.8, dense and with experts: gated delta nets beside attention."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.qwen3_next import Qwen3NextConfig
from asyncllm.models.layers.delta_net import GatedDeltaNet
from asyncllm.models.layers.norm import GemmaRMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.predicting import PredictingLM


class Qwen3NextForCausalLM(PredictingLM[Qwen3NextConfig]):
    """Delta nets with their projections in two matrices."""

    norm_type = GemmaRMSNorm
    has_head_norms = True
    has_shared_gate = True
    renamed: ClassVar[dict[str, str]] = {
        ".linear_attn.": ".self_attn.",
        ".mlp.shared_expert_gate.": ".mlp.gate.shared_gate.",
    }
    #: See ``GatedDeltaNet``.
    grouped_on_disk = True
    predictor_names: ClassVar[dict[str, str | None]] = {
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "fc.": "project.",
        "layers.0.": "layer.",
        "layers.": None,
    }
    carries_normed = True

    def make_attention(
        self, config: Qwen3NextConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        bias = config.attention_bias
        return self._attention(config, spec, place, qkv_bias=bias, out_bias=bias, has_gate=True)

    def make_recurrent(
        self, config: Qwen3NextConfig, layer: int, place: Placement
    ) -> GatedDeltaNet:
        return GatedDeltaNet(config, layer, place, grouped_on_disk=self.grouped_on_disk)

    def predictor_mlp(self) -> int:
        return 0

    def predictor_part(self, name: str) -> str | None:
        return name.removeprefix("mtp.") if name.startswith("mtp.") else None


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """With matrices that are apart in the checkpoint."""

    grouped_on_disk = False
