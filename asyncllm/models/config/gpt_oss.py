"""gpt-oss."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

from asyncllm.errors import ModelError
from asyncllm.models.config.base import FULL, SLIDING, Experts, MoeConfig, Size, Window
from asyncllm.models.rope import RopeConfig

_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(MoeConfig, frozen=True, kw_only=True):
    """Every other layer has a window, the first one too.

    Attributes:
        swiglu_alpha: of the experts' activation; see ``ClampedExperts``.
        swiglu_limit: likewise.
    """

    default_theta: ClassVar[float] = 150_000.0
    has_sinks: ClassVar[bool] = True
    experts_field: ClassVar[str] = "num_local_experts"

    head_dim: Size | None = 64
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: Window | None = 128
    num_key_value_heads: Size | None = 8
    num_local_experts: Experts | None = 128
    num_experts_per_tok: Size = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts == 0:
            raise ModelError("num_local_experts is 0: every layer has experts")
        if not (math.isfinite(self.swiglu_alpha) and 0 < self.swiglu_limit < math.inf):
            raise ModelError(
                f"swiglu_alpha is {self.swiglu_alpha} and swiglu_limit {self.swiglu_limit}: both "
                "must be finite, and the limit positive"
            )

    @property
    def activation(self) -> str:
        return "silu"  # of no use: the experts have their own

    def layer_type(self, layer: int) -> str:
        return self._listed_layer_type(layer) or (FULL if layer % 2 else SLIDING)

    def rope(self, layer: int) -> RopeConfig | None:
        if self.rope_scaling or self.rope_parameters:
            return super().rope(layer)
        return self._rope({"rope_theta": self.theta, **_ROPE}, layer)
