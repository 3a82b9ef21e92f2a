"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.base import FULL, SLIDING, DecoderConfig, Length


class Phi3Config(DecoderConfig, frozen=True, kw_only=True):
    """Phi-3. Early checkpoints call longrope "su" or "yarn"."""

    has_partial_rotary: ClassVar[bool] = True

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Length | None = 4096

    def layer_type(self, layer: int) -> str:
        return FULL if self.sliding_window is None else SLIDING

    def _rope_type(self, name: str) -> str:
        return "longrope" if name in ("su", "yarn") else name
