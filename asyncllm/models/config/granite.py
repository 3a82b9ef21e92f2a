"""Granite 3, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.base import Experts, MoeConfig, Size, SizeOrZero


class GraniteConfig(MoeConfig, frozen=True, kw_only=True):
    """Granite: factors of embeddings, attention scores and residuals, a divisor of logits.

    Those without experts have an MLP in every layer.
    """

    experts_field: ClassVar[str] = "num_local_experts"

    num_experts_per_tok: Size = 2
    num_local_experts: Experts | None = 0
    norm_topk_prob: bool = True
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @property
    def embedding_scale(self) -> float | None:
        return self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def logit_divisor(self) -> float:
        return self.logits_scaling


class GraniteMoeConfig(GraniteConfig, frozen=True, kw_only=True):
    """Granite with a mixture of experts and, in some, one that all tokens go through."""

    num_local_experts: Experts | None = 8
    shared_intermediate_size: SizeOrZero = 0

    @property
    def shared_expert_size(self) -> int:
        return self.shared_intermediate_size
