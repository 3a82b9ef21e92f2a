"""Gemma 3, and the text part of its multimodal checkpoints."""

from __future__ import annotations

from functools import partial

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Gemma3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.norm import GemmaRMSNorm
from asyncllm.models.layers.parameter import Placement

_VISION = ("vision_tower.", "multi_modal_projector.")


class Gemma3ForCausalLM(DecoderLM[Gemma3Config]):
    """Gemma 2 with a norm on each query and key head instead of soft-capped scores.

    Sliding and full layers have different rotary encodings.
    """

    norm_type = GemmaRMSNorm

    def make_layer(self, config: Gemma3Config, spec: AttentionSpec, place: Placement) -> nn.Module:
        hidden, bias = config.hidden_size, config.attention_bias
        attention = Attention(
            spec,
            hidden,
            place,
            qkv_bias=bias,
            out_bias=bias,
            head_norm=partial(GemmaRMSNorm, config.head_size, config.rms_norm_eps, place),
        )
        mlp = GatedMLP(hidden, config.intermediate_size, config.activation, place)
        return SandwichNormBlock(attention, mlp, config, place)

    def checkpoint_name(self, name: str) -> str | None:
        """In multimodal checkpoints, the text part is in ``language_model``, inside or outside."""
        if name.removeprefix("model.").startswith(_VISION):
            return None
        return super().checkpoint_name(name.replace("language_model.", "", 1))
