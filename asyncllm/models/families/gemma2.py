"""Gemma 2."""

from __future__ import annotations

from asyncllm.models.config import Gemma2Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.block import SandwichNormBlock
from asyncllm.models.layers.norm import GemmaRMSNorm


class Gemma2ForCausalLM(DecoderLM[Gemma2Config]):
    """Every other layer slides; attention scores and logits are soft-capped."""

    norm_type = GemmaRMSNorm
    block_type = SandwichNormBlock
