"""Configurations of models that are never loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
#: As on the hub.
QWEN3_8B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_06B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
#: Experts alone, of which each token uses 8 of 128.
QWEN3_30B_A3B: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
#: Two sizes of heads, values that are keys, and experts beside an MLP.
GEMMA4_26B_A4B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
    },
}
#: A dense layer, then experts and a shared one.
GLM45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "eos_token_id": 151329,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
#: Gated delta nets in three of four layers.
QWEN36_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 262144,
        "eos_token_id": 248046,
    },
}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def config_folder(parent: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A folder with a config.json, and nothing else."""
    folder = parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
