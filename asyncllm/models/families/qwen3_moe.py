"""Qwen3 with a mixture of experts."""

from __future__ import annotations

from torch import nn

from asyncllm.models.config import Qwen3MoeConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.moe import SparseMoE
from asyncllm.models.layers.parameter import Placement


class Qwen3MoeForCausalLM(DecoderLM[Qwen3MoeConfig]):
    """Qwen3 with experts or, in the layers that config.json names, one MLP."""

    has_head_norms = True

    def make_mlp(self, config: Qwen3MoeConfig, layer: int, place: Placement) -> nn.Module:
        if not config.is_sparse(layer):
            return super().make_mlp(config, layer, place)
        return SparseMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.activation,
            place,
            num_experts=config.experts,
            top_k=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
        )
