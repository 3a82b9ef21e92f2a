"""OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from asyncllm.models.config.olmo import Olmo2Config, OlmoeConfig
from asyncllm.models.decoder import DecoderLM, MoeDecoderLM
from asyncllm.models.layers.attention import WholeNormAttention
from asyncllm.models.layers.block import PostNormBlock


class Olmo2ForCausalLM(DecoderLM[Olmo2Config]):
    """Norms after attention and MLP, and over all query and key heads. OLMo 3 has windows, too."""

    attention_type = WholeNormAttention
    block_type = PostNormBlock
    has_head_norms = True


class OlmoeForCausalLM(MoeDecoderLM[OlmoeConfig]):
    """Llama with experts in every layer, and norms over all query and key heads."""

    attention_type = WholeNormAttention
    has_head_norms = True
