"""Tiny checkpoints with random weights, written by transformers, one per family.

Weights are large enough that logits lie far apart: two correct implementations then choose the same
tokens. Norms and biases are random too, so that a forgotten one shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

BOS, EOS, OTHER_EOS = 1, 2, 3
WINDOW = 32

_COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_ROTARY: dict[str, Any] = {**_COMMON, "intermediate_size": 96, "num_key_value_heads": 2}

#: By family: the configuration class, and what it is made with.
_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "opt": (OPTConfig, {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": (LlamaConfig, _ROTARY),
    "llama3": (
        LlamaConfig,
        {
            **_ROTARY,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (MistralConfig, {**_ROTARY, "head_dim": 24, "sliding_window": WINDOW}),
    "qwen2": (
        Qwen2Config,
        {
            **_ROTARY,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (Qwen3Config, {**_ROTARY, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            **_ROTARY,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": (
        Gemma2Config,
        {
            **_ROTARY,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_ROTARY,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 1_000_000.0,
                    "factor": 8.0,
                },
            },
        },
    ),
    "phi3": (
        Phi3Config,
        {
            **_ROTARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
}

#: Every name ``make`` knows.
FAMILIES = tuple(_FAMILIES)

#: Families whose checkpoint is written in several shards.
SHARDED = ("qwen3_moe",)


def make(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny float32 checkpoint of a family to a folder, and return the folder.

    Args:
        overrides: fields of the configuration. ``dtype`` is that on disk; ``max_shard_size`` (in
            bytes) cuts the weights into shards.
    """
    kind, fields = _FAMILIES[family]
    shard_size = overrides.pop("max_shard_size", 200_000 if family in SHARDED else 10**9)
    dtype = overrides.pop("dtype", torch.float32)
    config = kind(**{**fields, **overrides})
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    randomize(model, seed)
    save(model.to(dtype), folder, shard_size)
    return folder


def make_multimodal_gemma3(folder: Path, seed: int = 0) -> Path:
    """Write a tiny Gemma 3 checkpoint with a vision tower, as google's larger ones are."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Gemma3Config(
        text_config=_FAMILIES["gemma3"][1], vision_config=vision, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(config)
    randomize(model, seed)
    save(model, folder, 10**9)
    return folder


def randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter random values: matrices around 0, norms around their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(values * 0.15)
            else:
                parameter.add_(values * 0.1)


def save(model: Any, folder: Path, shard_size: int) -> None:
    """Write configuration, weights and generation_config.json."""
    model.generation_config = GenerationConfig(
        bos_token_id=BOS,
        eos_token_id=[EOS, OTHER_EOS],
        pad_token_id=0,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
    )
    model.save_pretrained(folder, max_shard_size=shard_size)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; the value None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
