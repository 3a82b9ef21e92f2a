"""GLM-4 and GLM-4-0414."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.glm import GlmConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


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
