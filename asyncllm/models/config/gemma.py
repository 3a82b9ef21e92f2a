"""Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.base import (
    FULL,
    SLIDING,
    Count,
    DecoderConfig,
    Length,
    Size,
    VocabSize,
    Window,
)
from asyncllm.models.rope import RopeConfig


class GemmaConfig(DecoderConfig, frozen=True, kw_only=True):
    """Gemma 1. Early checkpoints say "gelu" where they mean its tanh approximation."""

    head_dim: Size | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    tie_word_embeddings: bool = True

    @property
    def activation(self) -> str:
        by_older_name = "gelu_pytorch_tanh" if self.hidden_act == "gelu" else self.hidden_act
        return self.hidden_activation or by_older_name

    @property
    def embedding_scale(self) -> float | None:
        return float(self.hidden_size**0.5)


class Gemma2Config(GemmaConfig, frozen=True, kw_only=True):
    """Gemma 2: every other layer slides, the first one included."""

    query_pre_attn_scalar: float = 256
    sliding_window: Window | None = 4096
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    @property
    def activation(self) -> str:
        return self.hidden_activation or "gelu_pytorch_tanh"

    @property
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def attention_softcap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def layer_type(self, layer: int) -> str:
        by_rule = FULL if layer % 2 else SLIDING
        return self._listed_layer_type(layer) or by_rule


class Gemma3Config(Gemma2Config, frozen=True, kw_only=True):
    """The text part of Gemma 3: every sixth layer is full, with its own rotary base.

    Multimodal checkpoints omit values equal to these defaults. ``rope_scaling`` applies to full
    layers only.
    """

    default_theta: ClassVar[float] = 1_000_000.0

    vocab_size: VocabSize = 262_208
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    max_position_embeddings: Length = 131_072
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: float = 10_000.0

    @property
    def attention_softcap(self) -> float | None:
        return None

    def layer_type(self, layer: int) -> str:
        by_rule = SLIDING if (layer + 1) % self.sliding_window_pattern else FULL
        return self._listed_layer_type(layer) or by_rule

    def rope(self, layer: int) -> RopeConfig:
        kind = self.layer_type(layer)
        given = (self.rope_parameters or {}).get(kind) or {}
        if kind == SLIDING:
            return self._rope({"rope_theta": self.rope_local_base_freq, **given}, layer)
        scaling = self.rope_scaling or {}
        return self._rope({"rope_theta": self.theta, **given, **scaling}, layer)
