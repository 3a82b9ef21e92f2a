"""Qwen3, dense."""

from __future__ import annotations

from asyncllm.models.config.qwen import Qwen3Config
from asyncllm.models.decoder import DecoderLM


class Qwen3ForCausalLM(DecoderLM[Qwen3Config]):
    """Llama with a norm on each query and key head."""

    has_head_norms = True
