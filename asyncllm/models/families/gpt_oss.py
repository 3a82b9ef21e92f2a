"""gpt-oss."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.kernels.types import Routing
from asyncllm.models.config.gpt_oss import GptOssConfig
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.moe import ClampedExperts
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import Router


class GptOssForCausalLM(MoeDecoderLM[GptOssConfig]):
    """Attention with sinks, and experts with biases; every other layer has a window."""

    renamed: ClassVar[dict[str, str]] = {".mlp.router.": ".mlp.gate."}

    def make_experts(self, config: GptOssConfig, place: Placement) -> ClampedExperts:
        return ClampedExperts(
            config.experts,
            config.hidden_size,
            config.expert_size,
            place,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
        )

    def make_router(self, config: GptOssConfig, place: Placement) -> Router:
        sizes = config.hidden_size, config.experts
        return Router(*sizes, place, self.routing(config), bias=True)

    def routing(self, config: GptOssConfig) -> Routing:
        return Routing(config.num_experts_per_tok, "softmax", normalize=True)
