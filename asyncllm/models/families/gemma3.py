"""Gemma 3, and the text part of its multimodal checkpoints."""

from __future__ import annotations

from asyncllm.models.config import Gemma3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.norm import GemmaRMSNorm

_VISION = ("vision_tower.", "multi_modal_projector.")


class Gemma3ForCausalLM(DecoderLM[Gemma3Config]):
    """Gemma 2 with a norm on each query and key head instead of soft-capped scores.

    Sliding and full layers have different rotary encodings.
    """

    norm_type = GemmaRMSNorm
    block_type = SandwichNormBlock
    has_head_norms = True

    def checkpoint_name(self, name: str) -> str | None:
        """In multimodal checkpoints, the text part is in ``language_model``, inside or outside."""
        if name.removeprefix("model.").startswith(_VISION):
            return None
        return super().checkpoint_name(name.replace("language_model.", "", 1))
