"""LFM2, dense and with experts: gated short convolutions beside attention."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.kernels.types import Routing
from asyncllm.models.config.lfm2 import Lfm2Config, Lfm2MoeConfig
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.recurrent import GatedConvolution
from asyncllm.models.layers.router import BalancedRouter, Router


class Lfm2ForCausalLM(MoeDecoderLM[Lfm2Config]):
    """Llama with norms on heads, and with convolutions in the place of most attention."""

    has_head_norms = True
    renamed: ClassVar[dict[str, str]] = {
        "model.embedding_norm.": "model.norm.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".self_attn.q_layernorm.": ".self_attn.q_norm.",
        ".self_attn.k_layernorm.": ".self_attn.k_norm.",
        ".conv.conv.": ".self_attn.conv1d.",
        ".conv.": ".self_attn.",
        ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }

    def make_recurrent(self, config: Lfm2Config, layer: int, place: Placement) -> GatedConvolution:
        return GatedConvolution(
            config.hidden_size, config.conv_L_cache, layer, place, bias=config.conv_bias
        )

    def make_router(self, config: Lfm2Config, place: Placement) -> Router:
        assert isinstance(config, Lfm2MoeConfig)
        kind = BalancedRouter if config.use_expert_bias else Router
        return kind(config.hidden_size, config.experts, place, self.routing(config))

    def routing(self, config: Lfm2Config) -> Routing:
        assert isinstance(config, Lfm2MoeConfig)
        factor = config.routed_scaling_factor
        return super().routing(config)._replace(scores="sigmoid", factor=factor)
