"""Mixtral."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.mistral import MixtralConfig
from asyncllm.models.moe_decoder import MoeDecoderLM


class MixtralForCausalLM(MoeDecoderLM[MixtralConfig]):
    """Mistral with experts in every layer."""

    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
