"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.errors import ModelError
from asyncllm.models.config.base import (
    FULL,
    SLIDING,
    DecoderConfig,
    Experts,
    MoeConfig,
    Size,
    Window,
)


class MistralConfig(DecoderConfig, frozen=True, kw_only=True):
    """Mistral; ``sliding_window`` null means none, and ``layer_types`` where it applies."""

    sliding_window: Window | None = 4096

    def layer_type(self, layer: int) -> str:
        if self.sliding_window is None:
            return FULL
        return self._listed_layer_type(layer) or SLIDING


class Ministral3Config(MistralConfig, frozen=True, kw_only=True):
    """Ministral 3, and the text part of Mistral 3: queries at far positions may be scaled."""

    head_dim: Size | None = 128
    rms_norm_eps: float = 1e-5
    sliding_window: Window | None = None
    model_type: str = "ministral3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_type not in ("ministral3", "mistral", "mistral3"):
            raise ModelError(
                f"a text part of type {self.model_type!r} is not supported; "
                "'mistral' and 'ministral3' are"
            )
        if self.model_type == "ministral3" and not (self.rope_scaling or self.rope_parameters):
            raise ModelError("rope_parameters are missing: Ministral 3 needs its own")

    @property
    def query_scaling(self) -> tuple[float, int] | None:
        """None, or (b, s): a query at position p is multiplied by 1 + b * log(1 + p // s)."""
        rope = self.rope_scaling or self.rope_parameters or {}
        beta, span = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        return (float(beta), int(span)) if beta and span else None


class MixtralConfig(MoeConfig, frozen=True, kw_only=True):
    """Mixtral: all layers are sparse."""

    default_theta: ClassVar[float] = 1_000_000.0
    experts_field: ClassVar[str] = "num_local_experts"

    rms_norm_eps: float = 1e-5
    num_experts_per_tok: Size = 2
    num_local_experts: Experts | None = 8
    norm_topk_prob: bool = True

    def layer_type(self, layer: int) -> str:
        return FULL if self.sliding_window is None else SLIDING
