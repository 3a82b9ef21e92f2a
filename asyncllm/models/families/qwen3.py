"""Qwen3, dense."""

from __future__ import annotations

from functools import partial

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Qwen3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement


class Qwen3ForCausalLM(DecoderLM[Qwen3Config]):
    """Llama with a norm on each query and key head."""

    def make_layer(self, config: Qwen3Config, spec: AttentionSpec, place: Placement) -> nn.Module:
        attention = Attention(
            spec,
            config.hidden_size,
            place,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            head_norm=partial(RMSNorm, config.head_size, config.rms_norm_eps, place),
        )
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, place)
        return PreNormBlock(attention, mlp, config, place)
