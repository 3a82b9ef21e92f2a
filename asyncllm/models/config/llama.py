"""Llama and families that hardly differ from it."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.errors import ModelError
from asyncllm.models.config.base import FULL, SLIDING, Count, DecoderConfig, Size
from asyncllm.models.rope import RopeConfig


class LlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """Llama 2 and 3."""

    mlp_bias: bool = False


class SmolLM3Config(LlamaConfig, frozen=True, kw_only=True):
    """SmolLM3: layers with a 0 in ``no_rope_layers``, by default every fourth, have no positions.

    With ``use_sliding_window``, those are the ones that slide.
    """

    default_theta: ClassVar[float] = 2_000_000.0

    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Count = 4
    use_sliding_window: bool = False

    def layer_type(self, layer: int) -> str:
        slides = self.use_sliding_window and not self._rotates(layer)
        return self._listed_layer_type(layer) or (SLIDING if slides else FULL)

    def rope(self, layer: int) -> RopeConfig | None:
        return super().rope(layer) if self._rotates(layer) else None

    def _rotates(self, layer: int) -> bool:
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        if len(self.no_rope_layers) < self.num_hidden_layers:
            raise ModelError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        return self.no_rope_layers[layer] != 0


class SeedOssConfig(LlamaConfig, frozen=True, kw_only=True):
    """Seed-OSS: the output projection of attention has a switch of its own for its bias."""

    head_dim: Size | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False
