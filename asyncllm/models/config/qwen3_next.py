"""Qwen3-Next, and Qwen3.5 to 3.8: most layers are gated delta nets."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.errors import ModelError
from asyncllm.models.config.base import (
    FULL,
    LINEAR,
    Count,
    Experts,
    MoeConfig,
    Size,
    SizeOrZero,
    Width,
)
from asyncllm.models.state import StateShape


class Qwen3NextConfig(MoeConfig, frozen=True, kw_only=True):
    """Gated delta nets, and attention in every fourth layer unless ``layer_types`` says otherwise.

    Those without experts have an MLP in every layer.
    """

    has_partial_rotary: ClassVar[bool] = True

    intermediate_size: Size = 5632
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 256
    partial_rotary_factor: float = 0.25
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Width = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    num_experts: Experts | None = 512
    num_experts_per_tok: Size = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: SizeOrZero = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_silu()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ModelError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )

    @property
    def key_size(self) -> int:
        """Elements of the keys of a delta net, which are as many as those of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of the values of a delta net."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def state(self, layer: int) -> StateShape | None:
        if self.layer_type(layer) == FULL:
            return None
        return StateShape(
            channels=2 * self.key_size + self.value_size,
            width=self.linear_conv_kernel_dim,
            heads=self.linear_num_value_heads,
            keys=self.linear_key_head_dim,
            values=self.linear_value_head_dim,
            dtype=self.state_dtype,
        )

    def layer_type(self, layer: int) -> str:
        by_rule = LINEAR if (layer + 1) % self.full_attention_interval else FULL
        return self._listed_layer_type(layer, (FULL, LINEAR)) or by_rule

    @property
    def shared_expert_size(self) -> int:
        return self.shared_expert_intermediate_size

    def is_sparse(self, layer: int) -> bool:
        if self.experts == 0 or layer in (self.mlp_only_layers or ()):
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    @property
    def more_params(self) -> tuple[int, int]:
        attending = sum(self.has_attention(layer) for layer in range(self.num_hidden_layers))
        gates = self.hidden_size * self.num_attention_heads * self.head_size(0)
        inputs = 2 * self.key_size + 2 * self.value_size + 2 * self.linear_num_value_heads
        delta_net = self.hidden_size * (inputs + self.value_size)
        delta_net += (2 * self.key_size + self.value_size) * self.linear_conv_kernel_dim
        return attending * gates + (self.num_hidden_layers - attending) * delta_net, 0


class Qwen3_5MoeConfig(Qwen3NextConfig, frozen=True, kw_only=True):
    """Qwen3.5 with experts, the text part of a model that sees images.

    A position has three numbers there ("mrope"), which are the same in text.
    """

    num_experts: Experts | None = 256
    num_experts_per_tok: Size = 8

    def _rope_type(self, name: str) -> str:
        return "default" if name == "mrope" else name


class Qwen3_5Config(Qwen3_5MoeConfig, frozen=True, kw_only=True):
    """Qwen3.5 without experts."""

    intermediate_size: Size = 12288
    num_key_value_heads: Size | None = 4
    num_experts: Experts | None = 0
