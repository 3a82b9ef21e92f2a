"""Gemma 1, 2 and 3."""

from __future__ import annotations

from asyncllm.models.config.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.norm import GemmaRMSNorm


class GemmaForCausalLM(DecoderLM[GemmaConfig]):
    """Llama with scaled embeddings and norms of its own."""

    norm_type = GemmaRMSNorm


class Gemma2ForCausalLM(DecoderLM[Gemma2Config]):
    """Every other layer slides; attention scores and logits are soft-capped."""

    norm_type = GemmaRMSNorm
    block_type = SandwichNormBlock


class Gemma3ForCausalLM(DecoderLM[Gemma3Config]):
    """Gemma 2 with a norm on each query and key head instead of soft-capped scores.

    Sliding and full layers have different rotary encodings.
    """

    norm_type = GemmaRMSNorm
    block_type = SandwichNormBlock
    has_head_norms = True
