"""Tiny checkpoints with random weights, written by transformers, one per family.

Weights are large enough that logits lie far apart: two correct implementations then choose the same
tokens. Norms and biases are random too, so that a forgotten one shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto import modeling_auto as auto

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

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "norm_topk_prob": True}
_GRANITE: dict[str, Any] = {
    **_ROTARY,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_LAYERS = [
    *("sliding_attention", "full_attention", "sliding_attention"),
    *("sliding_attention", "full_attention"),
]
#: Positions with a number each for time, height and width.
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
}

#: With a small epsilon, norms of results near zero magnify rounding errors.
_DELTA_NETS: dict[str, Any] = {
    **_ROTARY,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}

#: By family: the name of its configuration class in transformers, and what it is made with.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {**_COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "llama": ("LlamaConfig", _ROTARY),
    "llama3": (
        "LlamaConfig",
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
    "mistral": ("MistralConfig", {**_ROTARY, "head_dim": 24, "sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2Config",
        {
            **_ROTARY,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("Qwen3Config", {**_ROTARY, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
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
        "Gemma2Config",
        {
            **_ROTARY,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_ROTARY,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_ROTARY,
            **_GEMMA4,
            "layer_types": _GEMMA4_LAYERS,
            "num_hidden_layers": len(_GEMMA4_LAYERS),
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 384,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            **_ROTARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**_DELTA_NETS, "num_hidden_layers": 4}),
    "gemma": ("GemmaConfig", {**_ROTARY, "head_dim": 32}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_DELTA_NETS,
            **_EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_ROTARY,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_ROTARY,
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3_5_moe_vision": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **_DELTA_NETS,
                "layer_types": ["full_attention", "linear_attention"],
                "num_hidden_layers": 2,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 48,
                "shared_expert_intermediate_size": 48,
            },
            "vision_config": _QWEN_VISION,
        },
    ),
    "smollm3": ("SmolLM3Config", {**_ROTARY, "num_hidden_layers": 4}),
    "olmo2": ("Olmo2Config", _ROTARY),
    "olmo3": (
        "Olmo3Config",
        {
            **_ROTARY,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "olmoe": ("OlmoeConfig", {**_ROTARY, **_EXPERTS, "num_experts": 8}),
    "granite": ("GraniteConfig", {**_GRANITE, "mlp_bias": True}),
    "granite_moe": (
        "GraniteMoeSharedConfig",
        {
            **_GRANITE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "rms_norm_eps": 1e-3,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_COMMON,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe")
            ],
            "intermediate_size": 96,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 4,
            "ssm_state_size": 24,
            "time_step_min": 1e-6,  # transformers limits the steps of prompts alone by it
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 56,
            "routed_scaling_factor": 1.5,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "glm": ("GlmConfig", {**_ROTARY, "head_dim": 16}),
    "glm4": ("Glm4Config", {**_ROTARY, "head_dim": 16}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_ROTARY,
            **_EXPERTS,
            "num_experts_per_tok": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "ministral": (
        "MinistralConfig",
        {
            **_ROTARY,
            "head_dim": 24,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            **_ROTARY,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {**_ROTARY, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_ROTARY,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "seed_oss": ("SeedOssConfig", {**_ROTARY, "head_dim": 24, "mlp_bias": True}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_ROTARY,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "starcoder2": ("Starcoder2Config", {**_ROTARY, "sliding_window": WINDOW}),
    "gemma4_vision": (
        "Gemma4Config",
        {
            "text_config": "gemma4",
            "vision_config": {**_VISION, "head_dim": 8, "num_key_value_heads": 2},
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            **_ROTARY,
            **_GEMMA4,
            "layer_types": _GEMMA4_LAYERS[:2],
            "num_hidden_layers": 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {**_ROTARY, **_GEMMA4, "num_hidden_layers": 7, "attention_k_eq_v": False},
    ),
    "gemma3_vision": (
        "Gemma3Config",
        {"text_config": "gemma3", "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "mistral3_vision": (
        "Mistral3Config",
        {
            "text_config": "mistral",
            "vision_config": {**_VISION, "model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vision": (
        "Qwen2_5_VLConfig",
        {"text_config": {**_ROTARY, **_MROPE}, "vision_config": _QWEN_VISION},
    ),
    "qwen3_vision": (
        "Qwen3VLConfig",
        {
            "text_config": {**_ROTARY, **_MROPE, "head_dim": 16},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe_vision": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {
                **_ROTARY,
                **_MROPE,
                "head_dim": 16,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 48,
            },
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
}

#: Every name ``make`` knows.
FAMILIES = tuple(_FAMILIES)

#: Families that together have every mechanism, for tests of all combinations.
REPRESENTATIVE = FAMILIES[: FAMILIES.index("gemma")]
#: The others have one combined test.
FURTHER = FAMILIES[len(REPRESENTATIVE) :]

#: Families whose checkpoint is written in several shards.
SHARDED = ("qwen3_moe",)

#: Families whose published checkpoints have the transposes of experts; transformers reads, but does
#: not write them.
TRANSPOSED = ("qwen3_moe_vision",)


def make(family: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny float32 checkpoint of a family to a folder, and return the folder.

    Args:
        overrides: fields of the configuration. ``dtype`` is that on disk; ``max_shard_size`` (in
            bytes) cuts the weights into shards; ``std`` is the size of their numbers.
    """
    shard_size = overrides.pop("max_shard_size", 200_000 if family in SHARDED else 10**9)
    dtype, std = overrides.pop("dtype", torch.float32), overrides.pop("std", 0.15)
    config = _config(family, overrides)
    model = _class_of(config)(config)
    randomize(model, seed, std)
    if family.startswith("gemma4"):
        _rescale_scores(model)
    save(model.to(dtype), folder, shard_size)
    if family in TRANSPOSED:
        _transpose_experts(folder / "model.safetensors")
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder in transformers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = _class_of(config).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for module in model.modules():
        # Some versions of transformers always take 7, gpt-oss's, whatever config.json says.
        if type(module).__name__ == "GptOssExperts":
            module.limit = config.swiglu_limit
    return model


def _config(family: str, overrides: dict[str, Any]) -> Any:
    name, fields = _FAMILIES[family]
    fields = {**fields, **overrides}
    if isinstance(text := fields.get("text_config"), str):
        name_of_text, fields_of_text = _FAMILIES[text]
        model_type = getattr(transformers, name_of_text).model_type
        fields["text_config"] = {**fields_of_text, "model_type": model_type}
    return getattr(transformers, name)(**fields)


def _class_of(config: Any) -> Any:
    takes_images = hasattr(config, "vision_config")
    by_images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (by_images if takes_images else auto.MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


def _transpose_experts(file: Path) -> None:
    weights = load_file(file)
    changed = {n: t.mT.contiguous() if ".experts." in n else t for n, t in weights.items()}
    save_file(changed, file, metadata={"format": "pt"})


def randomize(model: nn.Module, seed: int, std: float = 0.15) -> None:
    """Give every parameter random values: matrices around 0, norms around their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(values * std)
            elif name.endswith(("sinks", "A_log")):
                parameter.copy_(values)
            elif name.endswith("bias"):  # some are random already
                parameter.copy_(values * 0.1)
            else:
                parameter.add_(values * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(".expert_bias"):  # transformers chooses by numbers in 16 bits
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * 0.1)


def _rescale_scores(model: nn.Module) -> None:
    """In Gemma 4, trained norms scale the scores of attention and routers. With norms around 1,
    attention is so sharp, and routers are so undecided, that both magnify rounding errors."""
    factors = {"q_norm.weight": 0.25, "router.scale": 8.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for end, factor in factors.items():
                if name.endswith(end):
                    parameter.mul_(factor)


def save(model: Any, folder: Path, shard_size: int) -> None:
    """Write configuration, weights and generation_config.json."""
    model.generation_config = transformers.GenerationConfig(
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
