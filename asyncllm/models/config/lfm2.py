"""LFM2, dense and with experts: most layers are gated short convolutions."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from asyncllm.models.config.base import FULL, Experts, MoeConfig, Size, Width
from asyncllm.models.state import StateShape

CONVOLUTION = "conv"


class Lfm2Config(MoeConfig, frozen=True, kw_only=True):
    """LFM2 without experts. ``block_...`` give the size of its MLPs.

    ``block_ff_dim`` and ``tie_embedding`` are older names of ``intermediate_size`` and
    ``tie_word_embeddings``.
    """

    default_theta: ClassVar[float] = 1_000_000.0

    intermediate_size: Size = 12288
    num_key_value_heads: Size | None = 8
    rms_norm_eps: float = msgspec.field(default=1e-5, name="norm_eps")
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    num_experts: Experts | None = 0
    num_experts_per_tok: Size = 4
    conv_bias: bool = False
    conv_L_cache: Width = 3
    block_ff_dim: Size | None = None
    block_multiple_of: Size = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_silu()
        if self.tie_embedding is not None:
            msgspec.structs.force_setattr(self, "tie_word_embeddings", self.tie_embedding)

    def state(self, layer: int) -> StateShape | None:
        if self.layer_type(layer) == FULL:
            return None
        return StateShape(channels=self.hidden_size, width=self.conv_L_cache)

    def layer_type(self, layer: int) -> str:
        attends = self.full_attn_idxs is None or layer in self.full_attn_idxs
        listed = self._listed_layer_type(layer, (FULL, CONVOLUTION))
        return listed or (FULL if attends else CONVOLUTION)

    def mlp_size(self, layer: int) -> int:
        size = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(2 * size / 3)
        if self.block_ffn_dim_multiplier is not None:
            size = int(self.block_ffn_dim_multiplier * size)
            size = -(-size // self.block_multiple_of) * self.block_multiple_of
        return size

    @property
    def more_params(self) -> tuple[int, int]:
        layers = range(self.num_hidden_layers)
        convolutions = sum(not self.has_attention(layer) for layer in layers)
        return convolutions * self.hidden_size * (4 * self.hidden_size + self.conv_L_cache), 0


class Lfm2MoeConfig(Lfm2Config, frozen=True, kw_only=True):
    """LFM2 with experts; the first layers have one MLP."""

    intermediate_size: Size = 7168
    block_auto_adjust_ff_dim: bool = False
    moe_intermediate_size: Size = 1792
    num_experts: Experts | None = 32
    num_dense_layers: Experts = 2
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.num_dense_layers

    def mlp_size(self, layer: int) -> int:
        return 0 if self.is_sparse(layer) else super().mlp_size(layer)
