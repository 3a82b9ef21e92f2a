"""GLM-4 and GLM-4-0414; with experts, GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

import re
from typing import ClassVar

from torch import nn

from asyncllm.kernels.types import AttentionSpec, Routing
from asyncllm.models.config.glm import Glm4MoeConfig, GlmConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import BalancedRouter
from asyncllm.models.predicting import PredictingLM


class GlmForCausalLM(DecoderLM[GlmConfig]):
    """Llama with biases on queries, keys and values; half of each head is rotated."""

    rotates_neighbours = True

    def make_attention(self, config: GlmConfig, spec: AttentionSpec, place: Placement) -> nn.Module:
        return self._attention(config, spec, place, qkv_bias=config.attention_bias)

    def make_mlp(self, config: GlmConfig, layer: int, place: Placement) -> nn.Module:
        size = config.intermediate_size
        return GatedMLP(config.hidden_size, size, config.activation, place, fused_on_disk=True)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4 with norms after attention and MLP as well."""

    block_type = SandwichNormBlock

    def checkpoint_name(self, name: str) -> str | None:
        """The norms have other names than Gemma's, one of them with another meaning."""
        name = name.replace(".post_attention_layernorm.", ".pre_feedforward_layernorm.")
        name = name.replace(".post_self_attn_layernorm.", ".post_attention_layernorm.")
        return super().checkpoint_name(
            name.replace(".post_mlp_layernorm.", ".post_feedforward_layernorm.")
        )


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class Glm4MoeForCausalLM(PredictingLM[Glm4MoeConfig]):
    """Dense layers first, then experts and one that all tokens go through.

    Half of each head is rotated. Layers that predict further tokens come after the others.
    """

    renamed: ClassVar[dict[str, str]] = {".shared_experts.": ".shared_expert."}
    predictor_names: ClassVar[dict[str, str | None]] = {
        "another.": None,
        "enorm.": "embedding_norm.",
        "hnorm.": "hidden_norm.",
        "eh_proj.": "project.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": None,
        "embed_tokens.": None,
        "": "layer.",
    }

    def make_attention(
        self, config: Glm4MoeConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        bias, norms = config.attention_bias, config.use_qk_norm
        return self._attention(config, spec, place, qkv_bias=bias, has_head_norms=norms)

    def make_router(self, config: Glm4MoeConfig, place: Placement) -> BalancedRouter:
        return BalancedRouter(config.hidden_size, config.experts, place, self.routing(config))

    def routing(self, config: Glm4MoeConfig) -> Routing:
        return (
            super()
            .routing(config)
            ._replace(
                scores="sigmoid",
                factor=config.routed_scaling_factor,
                groups=config.n_group,
                top_groups=config.topk_group,
            )
        )

    def predictor_mlp(self) -> int:
        return self.config.num_hidden_layers

    def predictor_part(self, name: str) -> str | None:
        if (layer := _LAYER.match(name)) is None:
            return None
        ahead, rest = int(layer[1]) - self.config.num_hidden_layers, name[layer.end() :]
        if not 0 <= ahead < self.config.num_nextn_predict_layers:
            return None
        return rest if ahead == 0 else f"another.{rest}"
