"""Qwen3 with a mixture of experts."""

from __future__ import annotations

from functools import partial

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config import Qwen3MoeConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.moe import SparseMoE
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement


class Qwen3MoeForCausalLM(DecoderLM[Qwen3MoeConfig]):
    """Qwen3's attention, with experts or, where config.json says so, one MLP."""

    def make_layer(
        self, config: Qwen3MoeConfig, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        attention = Attention(
            spec,
            config.hidden_size,
            place,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            head_norm=partial(RMSNorm, config.head_size, config.rms_norm_eps, place),
        )
        mlp: nn.Module
        if config.is_sparse(spec.layer):
            mlp = SparseMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.activation,
                place,
                num_experts=config.experts,
                top_k=config.num_experts_per_tok,
                normalize=config.norm_topk_prob,
            )
        else:
            mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, place)
        return PreNormBlock(attention, mlp, config, place)
