"""OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.errors import ModelError
from asyncllm.models.config.base import FULL, SLIDING, DecoderConfig, MoeConfig, Window
from asyncllm.models.rope import RopeConfig


class Olmo2Config(DecoderConfig, frozen=True, kw_only=True):
    """OLMo 2."""

    rms_norm_eps: float = 1e-5


class Olmo3Config(Olmo2Config, frozen=True, kw_only=True):
    """OLMo 3: every fourth layer is full; only full layers have a stretched rotary encoding."""

    default_theta: ClassVar[float] = 500_000.0

    sliding_window: Window | None = 4096

    def layer_type(self, layer: int) -> str:
        by_rule = SLIDING if (layer + 1) % 4 else FULL
        return self._listed_layer_type(layer) or by_rule

    def rope(self, layer: int) -> RopeConfig:
        kind = self.layer_type(layer)
        given = (self.rope_parameters or {}).get(kind) or {}
        scaling = (self.rope_scaling or {}) if kind == FULL else {}
        return self._rope({"rope_theta": self.theta, **given, **scaling}, layer)


class OlmoeConfig(MoeConfig, frozen=True, kw_only=True):
    """OLMoE: ``intermediate_size`` is that of an expert."""

    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_qkv is not None:
            raise ModelError(f"clip_qkv is {self.clip_qkv}; only null is supported")
