"""What one rank of a model holds, reads and computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.executor.sim.shape import SHAPES
from asyncllm.lab.planning.gpus import GPUS
from asyncllm.lab.planning.rank import RankModel, rank_model
from asyncllm.models.spec import read_spec
from tests.support.models.configs import (
    FP8,
    GEMMA4_26B_A4B,
    GLM45_AIR,
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    config_folder,
)


def rank_of(
    folder: Path, config: dict[str, Any], tp: int = 1, gpu: str = "h200", **changes: Any
) -> RankModel:
    spec = read_spec(config_folder(folder, config, **changes))
    return rank_model(EngineConfig(tp=tp), spec, GPUS[gpu].for_kernels)


def test_the_whole_model_is_that_of_the_simulated_device(tmp_path: Path) -> None:
    rank, shape = rank_of(tmp_path, QWEN3_8B), SHAPES["h200-8b"]
    work, known = rank.work, shape.work(2)
    assert rank.weight_bytes == pytest.approx(2 * shape.stored_params, rel=1e-3)
    assert work.weight_bytes == pytest.approx(known.weight_bytes, rel=1e-3)
    assert work.token_flops == pytest.approx(known.token_flops, rel=1e-3)
    assert (work.kernels, work.kv_bytes) == (known.kernels, known.kv_bytes)
    assert (work.sample_flops, work.attention) == (known.sample_flops, known.attention)
    assert rank.num_sums == 0


def test_ranks_share_everything(tmp_path: Path) -> None:
    whole, half = rank_of(tmp_path, QWEN3_8B), rank_of(tmp_path, QWEN3_8B, tp=2)
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=1e-3)
    assert half.work.kv_bytes == whole.work.kv_bytes // 2
    assert half.work.token_flops == pytest.approx(whole.work.token_flops / 2, rel=1e-3)
    assert half.num_sums == 2 * 36 + 1, "attention, MLP; the embedding"
    sixteenth = rank_of(tmp_path, QWEN3_8B, tp=16).work.kv_bytes
    assert sixteenth == whole.work.kv_bytes // 8, "two ranks have the same"


def test_an_8_bit_cache(tmp_path: Path) -> None:
    whole, config = rank_of(tmp_path, QWEN3_8B), EngineConfig(kv_cache_dtype="fp8")
    spec = read_spec(config_folder(tmp_path, QWEN3_8B))
    found = rank_model(config, spec, GPUS["h200"].for_kernels)
    assert 2 * found.work.kv_bytes == whole.work.kv_bytes
    assert found.work.weight_bytes == whole.work.weight_bytes
    with pytest.raises(ModelError, match="needs a GPU of compute capability"):
        rank_model(config, spec, GPUS["a100-80"].for_kernels)


def test_experts(tmp_path: Path) -> None:
    rank = rank_of(tmp_path, QWEN3_30B_A3B, tp=4)
    assert rank.work.token_expert_bytes == rank.work.expert_bytes * 8 / 128
    assert 4 * rank.weight_bytes == pytest.approx(2 * 30.5e9, rel=0.02)
    assert rank.num_sums == 2 * 48 + 1


def test_every_token_reads_a_shared_expert(tmp_path: Path) -> None:
    rank, alone = (rank_of(tmp_path, GLM45_AIR, n_shared_experts=n) for n in (1, 0))
    assert rank.work.expert_bytes == alone.work.expert_bytes
    assert rank.work.token_expert_bytes == alone.work.token_expert_bytes
    shared = 2 * 45 * 3 * 4096 * 1408
    assert rank.work.weight_bytes - alone.work.weight_bytes == shared
    assert rank.work.token_flops - alone.work.token_flops == shared


def test_experts_are_padded_to_whole_blocks(tmp_path: Path) -> None:
    """Of 768 features, each of 4 ranks would have 192, and a scale has 128."""
    halves, fourths = (
        rank_of(tmp_path, QWEN3_30B_A3B, tp=tp, quantization_config=FP8) for tp in (2, 4)
    )
    assert halves.padded_bytes == 0
    assert 4 * fourths.work.expert_bytes == pytest.approx(2 * halves.work.expert_bytes * 256 / 192)
    assert fourths.padded_bytes == pytest.approx(fourths.work.expert_bytes * 64 / 256)


def test_layers_of_different_shapes(tmp_path: Path) -> None:
    rank, half = (rank_of(tmp_path, GEMMA4_26B_A4B, tp=tp) for tp in (1, 2))
    local, whole = 25 * 8 * 256, 5 * 2 * 512  # elements of keys
    assert rank.work.kv_bytes == 2 * 2 * (local + whole) == 2 * half.work.kv_bytes
    seen = {layers.window: (layers.kv_size, layers.heads_size) for layers in rank.work.attention}
    heads = 25 * 16 * 256, 5 * 16 * 512
    assert seen == {1024: (2 * local, heads[0]), math.inf: (2 * whole, heads[1])}
    assert rank.weight_bytes == pytest.approx(2 * 25.2e9, rel=0.01)
    angles = 256 + 512 // 4  # of heads of 256, and of a quarter of those of 512
    assert rank.table_bytes == pytest.approx(262_144 * angles * 4, rel=1e-3)
    assert rank.work.token_expert_bytes == rank.work.expert_bytes * 8 / 128
    assert half.num_sums == 3 * 30 + 1, "attention, MLP and experts; the embedding"


def test_layers_that_share_keys_and_values_read_but_do_not_keep_them(tmp_path: Path) -> None:
    text = {**GEMMA4_26B_A4B["text_config"], "num_kv_shared_layers": 12}
    own = rank_of(tmp_path, GEMMA4_26B_A4B).work
    shared = rank_of(tmp_path, GEMMA4_26B_A4B, text_config=text).work
    assert shared.kv_bytes == own.kv_bytes * 18 // 30
    assert shared.attention == own.attention
    assert shared.weight_bytes < own.weight_bytes


def test_what_cannot_be_divided_is_said_as_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tp 3 does not divide num_attention_heads 32"):
        rank_of(tmp_path, QWEN3_8B, tp=3)


def test_quantised_weights_where_kernels_take_them(tmp_path: Path) -> None:
    plain = rank_of(tmp_path, QWEN3_8B)
    kept = rank_of(tmp_path, QWEN3_8B, quantization_config=FP8)
    assert kept.kept == "large"
    assert 0.5 < kept.weight_bytes / plain.weight_bytes < 0.6, "not the embeddings"
    assert kept.work.token_flops == pytest.approx(plain.work.token_flops, rel=1e-3)
    expanded = rank_of(tmp_path, QWEN3_8B, gpu="a100-80", quantization_config=FP8)
    assert (expanded.kept, expanded.weight_bytes) == ("none", plain.weight_bytes)


def test_small_weights_are_expanded_where_16_bits_are_faster(tmp_path: Path) -> None:
    plain = rank_of(tmp_path, QWEN3_06B)
    small = rank_of(tmp_path, QWEN3_06B, quantization_config=FP8)
    assert small.weight_bytes == plain.weight_bytes
    # Shares of ranks count: 6 of 8 MiB of qkv_proj, and 4 of o_proj.
    whole, share = (rank_of(tmp_path, QWEN3_8B, tp, quantization_config=FP8) for tp in (1, 4))
    kept = whole.work.weight_bytes / rank_of(tmp_path, QWEN3_8B).work.weight_bytes
    expanded = share.work.weight_bytes / rank_of(tmp_path, QWEN3_8B, 4).work.weight_bytes
    assert expanded > kept + 0.05


def test_experts_in_blocks_stay_quantised_where_other_weights_do_not(tmp_path: Path) -> None:
    hopper, ada = (
        rank_of(tmp_path, QWEN3_30B_A3B, gpu=gpu, quantization_config=FP8)
        for gpu in ("h200", "l40s")
    )
    plain = rank_of(tmp_path, QWEN3_30B_A3B)
    assert (hopper.kept, ada.kept) == ("large", "experts")
    assert ada.work.expert_bytes == hopper.work.expert_bytes
    assert ada.work.weight_bytes == plain.work.weight_bytes
    assert ada.weight_bytes < 0.55 * plain.weight_bytes


def test_the_largest_captured_step_depends_on_what_a_token_is_multiplied_with(
    tmp_path: Path,
) -> None:
    """Not on all experts, nor on how many bytes the weights take."""
    dense = rank_of(tmp_path, QWEN3_8B).captured_tokens
    sparse = rank_of(tmp_path, QWEN3_30B_A3B).captured_tokens
    assert 1500 < dense < 1700
    assert 5000 < sparse < 5400
    more = rank_of(tmp_path, QWEN3_30B_A3B, num_experts=256).captured_tokens
    assert more == pytest.approx(sparse, rel=0.02), "routers have more rows"
    for config, tokens in ((QWEN3_8B, dense), (QWEN3_30B_A3B, sparse)):
        fp8 = rank_of(tmp_path, config, quantization_config=FP8).captured_tokens
        assert fp8 == pytest.approx(tokens, rel=0.01)
