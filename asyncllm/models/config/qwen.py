"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.base import FULL, SLIDING, Count, DecoderConfig, MoeConfig, Size, Window


class Qwen2Config(DecoderConfig, frozen=True, kw_only=True):
    """Qwen2 and Qwen2.5: with ``use_sliding_window``, layers from ``max_window_layers`` slide."""

    sliding_window: Window | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def layer_type(self, layer: int) -> str:
        if not self.use_sliding_window or self.sliding_window is None:
            return FULL
        by_rule = SLIDING if layer >= self.max_window_layers else FULL
        return self._listed_layer_type(layer) or by_rule


class Qwen3Config(Qwen2Config, frozen=True, kw_only=True):
    """Qwen3."""

    head_dim: Size | None = 128


class QwenMoeConfig(MoeConfig, frozen=True, kw_only=True):
    """Common to Qwen2-MoE and Qwen3-MoE: some layers may have one MLP."""

    moe_intermediate_size: Size
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None
    sliding_window: Window | None = 4096
    use_sliding_window: bool = False

    def is_sparse(self, layer: int) -> bool:
        if self.experts == 0 or layer in (self.mlp_only_layers or ()):
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


class Qwen2MoeConfig(QwenMoeConfig, frozen=True, kw_only=True):
    """Qwen2 with a mixture of experts, one of which all tokens go through.

    With ``use_sliding_window``, every other layer below ``max_window_layers`` slides.
    """

    shared_expert_intermediate_size: Size = 5632
    max_window_layers: int = 28
    qkv_bias: bool = True

    @property
    def shared_expert_size(self) -> int:
        return self.shared_expert_intermediate_size

    def layer_type(self, layer: int) -> str:
        if not self.use_sliding_window:
            return FULL
        by_rule = SLIDING if layer % 2 == 0 and layer < self.max_window_layers else FULL
        return self._listed_layer_type(layer) or by_rule


class Qwen3MoeConfig(QwenMoeConfig, frozen=True, kw_only=True):
    """Qwen3 with a mixture of experts; ``use_sliding_window`` holds for every layer."""

    intermediate_size: Size = 6144

    def layer_type(self, layer: int) -> str:
        return SLIDING if self.use_sliding_window and self.sliding_window is not None else FULL


class Qwen2VLConfig(Qwen2Config, frozen=True, kw_only=True):
    """The text part of Qwen2-VL and Qwen2.5-VL.

    A position has three numbers there ("mrope"). In text all three are the same, which makes it a
    plain rotary encoding.
    """

    default_theta: ClassVar[float] = 1_000_000.0

    rms_norm_eps: float = 1e-5

    def _rope_type(self, name: str) -> str:
        return "default" if name == "mrope" else name


class Qwen3VLConfig(Qwen3Config, frozen=True, kw_only=True):
    """The text part of Qwen3-VL; positions as in ``Qwen2VLConfig``."""

    default_theta: ClassVar[float] = 500_000.0

    def _rope_type(self, name: str) -> str:
        return "default" if name == "mrope" else name


class Qwen3VLMoeConfig(Qwen3MoeConfig, frozen=True, kw_only=True):
    """The text part of Qwen3-VL with experts; positions as in ``Qwen2VLConfig``."""

    default_theta: ClassVar[float] = 500_000.0

    norm_topk_prob: bool = True

    def _rope_type(self, name: str) -> str:
        return "default" if name == "mrope" else name
