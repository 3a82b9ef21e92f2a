"""gpt-oss."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

import msgspec

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
    norm_topk_prob: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: Annotated[float, msgspec.Meta(gt=0)] = 7.0

    def layer_type(self, layer: int) -> str:
        return self._listed_layer_type(layer) or (FULL if layer % 2 else SLIDING)

    def rope(self, layer: int) -> RopeConfig | None:
        if self.rope_scaling or self.rope_parameters:
            return super().rope(layer)
        return self._rope({"rope_theta": self.theta, **_ROPE})
