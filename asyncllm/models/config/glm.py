"""GLM-4, GLM-4-0414 and GLM-4 with experts (4.5, 4.6, 4.7)."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Count, DecoderConfig, Experts, MoeConfig, Size


class GlmConfig(DecoderConfig, frozen=True, kw_only=True):
    """GLM-4 and GLM-4-0414: half of each head is rotated."""

    has_partial_rotary: ClassVar[bool] = True

    head_dim: Size | None = 128
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    partial_rotary_factor: float = 0.5


class Glm4MoeConfig(MoeConfig, frozen=True, kw_only=True):
    """GLM-4 with a mixture of experts; the first layers have one MLP."""

    experts_field: ClassVar[str] = "n_routed_experts"
    has_partial_rotary: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    use_qk_norm: bool = False
    moe_intermediate_size: Size = 1408
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = True
    n_routed_experts: Experts = 128
    n_shared_experts: Experts = 1
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: Experts = 1
    num_nextn_predict_layers: Experts = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, best = self.n_group, self.topk_group
        each = self.experts // groups
        if groups > 1 and (self.experts % groups or each < 2):
            raise ModelError(f"n_group {groups} does not divide {self.experts} experts into groups")
        if best > groups or best * each < self.num_experts_per_tok:
            raise ModelError(
                f"topk_group is {best} of {groups} groups of {each} experts, of which a token "
                f"chooses {self.num_experts_per_tok}"
            )

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    @property
    def shared_expert_size(self) -> int:
        return self.n_shared_experts * self.expert_size

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace
