"""Families in their real widths, with few layers: as exact in bfloat16 as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm.models.config.base import MoeConfig
from asyncllm.models.spec import read_spec
from tests.support.models import quantized, rounding, tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "std": 0.02}

_FACTORS: dict[str, Any] = {"attention_multiplier": 1 / 128, "residual_multiplier": 0.22}
#: Of all sizes.
_DELTA_NETS: dict[str, Any] = {
    "head_dim": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-6,
}


def _sizes(hidden: int, mlp: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        **_LAYERS,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


#: Widths of published models; of experts fewer.
WIDE: dict[str, dict[str, Any]] = {
    "gemma": _sizes(2048, 16384, 8, 1, head_dim=256),  # 2B
    "smollm3": _sizes(2048, 11008, 16, 4, num_hidden_layers=4),  # 3B
    "seed_oss": _sizes(5120, 27648, 80, 8, head_dim=128),  # 36B
    "ministral3": _sizes(4096, 14336, 32, 8, head_dim=128),  # 8B
    "olmo2": _sizes(4096, 11008, 32, 32),  # 7B
    "olmo3": _sizes(4096, 11008, 32, 32, num_hidden_layers=4),  # 7B
    "granite": _sizes(4096, 12800, 32, 8, **_FACTORS),  # 8B
    "glm": _sizes(4096, 13696, 32, 2, head_dim=128),  # 9B
    "glm4": _sizes(4096, 13696, 32, 2, head_dim=128),  # 9B
    "gpt_oss": _sizes(2880, 2880, 64, 8, head_dim=64, sliding_window=128, swiglu_limit=7.0),  # 20B
    "starcoder2": _sizes(3072, 12288, 24, 2),  # 3B
    "mixtral": _sizes(4096, 3584, 32, 8),
    "qwen2_moe": _sizes(  # 2.7B active
        2048,
        5632,
        16,
        16,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "olmoe": _sizes(2048, 1024, 16, 16, num_experts=64, num_experts_per_tok=8),  # 1B active
    "granite_moe": _sizes(  # 3B
        1536, 512, 24, 8, num_local_experts=40, num_experts_per_tok=8, **_FACTORS
    ),
    "qwen3_5": _sizes(4096, 12288, 16, 4, **_DELTA_NETS),  # 9B
    "qwen3_next": _sizes(  # Qwen3.6-35B-A3B
        2048,
        512,
        16,
        2,
        **_DELTA_NETS,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        mlp_only_layers=None,
    ),
    "lfm2_moe": _sizes(  # 8B-A1B
        2048,
        7168,
        32,
        8,
        num_hidden_layers=3,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
    ),
    "granite_hybrid": _sizes(  # 4.0-H-Tiny
        1536,
        512,
        12,
        4,
        **_FACTORS,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=64,
        num_experts_per_tok=6,
        shared_intermediate_size=1024,
        mamba_n_heads=48,
        mamba_d_state=128,
        rms_norm_eps=1e-5,
    ),
    "nemotron_h": _sizes(  # 3 Nano
        2688,
        1856,
        32,
        2,
        head_dim=128,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        n_routed_experts=32,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        layer_norm_epsilon=1e-5,
    ),
    "gemma4": _sizes(  # E4B, but with fewer layers that share keys and values
        2560,
        10240,
        8,
        2,
        num_hidden_layers=5,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=256,
        sliding_window=512,
    ),
    "gemma4_moe": _sizes(  # 26B
        2816,
        2112,
        16,
        8,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        num_experts=64,
        top_k_experts=8,
        moe_intermediate_size=704,
        sliding_window=512,
    ),
    "glm4_moe": _sizes(  # 4.5-Air
        4096, 10944, 32, 8, n_routed_experts=32, moe_intermediate_size=1408, head_dim=128
    ),
}

PROMPTS = [[(7 * i + n) % 380 + 4 for i in range(n)] for n in (2, 5, 40, 200, 700)]


@pytest.mark.parametrize("family", WIDE)
async def test_real_widths(family: str, tmp_path: Path) -> None:
    folder = _with_tokenizer(tiny_models.make(family, tmp_path, **WIDE[family]))
    found = await rounding.errors(folder, PROMPTS, "cuda")
    config = read_spec(folder).config
    # Rounding sends a few tokens to another expert.
    has_experts = isinstance(config, MoeConfig) and config.experts > 0
    assert found.engine < (2.0 if has_experts else 1.3) * found.transformers + 1e-4, found


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-tensors", "awq"])
@pytest.mark.parametrize("family", ["glm4", "granite"])
async def test_quantised_forms(family: str, name: str, tmp_path: Path) -> None:
    """fp8 also rounds activations, to 4 bits of precision."""
    sizes = {**WIDE[family], "hidden_size": 2048, "intermediate_size": 4096}
    if family == "granite":
        sizes |= {"head_dim": 128, "mlp_bias": False}
    folder, dense = quantized.make(name, tmp_path, family, **sizes)
    found = await rounding.errors(_with_tokenizer(folder), PROMPTS, "cuda", dense)
    times = 1.5 if name == "awq" else 12.0
    assert found.engine < times * found.transformers + 1e-4, found


def _with_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    return folder
