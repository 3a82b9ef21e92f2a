"""The cost model of the simulated device against measured engines."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm import demo
from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.sim.cost import H200, Roofline, SimCost
from asyncllm.executor.sim.executor import build_sim
from asyncllm.executor.sim.profile import shipped
from asyncllm.executor.sim.shape import SHAPES, Attention, shape_of
from asyncllm.models.config.base import Config
from asyncllm.models.config.gpt_oss import GptOssConfig
from asyncllm.models.config.opt import OPTConfig
from asyncllm.models.config.qwen import Qwen3Config, Qwen3MoeConfig
from asyncllm.models.quant.config import Quantization
from asyncllm.models.spec import ModelSpec, read_spec
from asyncllm.types.sampling_defaults import SamplingDefaults
from tests.support.engine.sim_driver import COST, EOS


def step_ms(cost: SimCost, rows: list[tuple[int, int]], num_samples: int | None = None) -> float:
    """Milliseconds of a step with rows of (start, length)."""
    starts, lengths = np.array(rows, dtype=np.int64).T
    return 1e3 * cost.seconds(starts, lengths, len(rows) if num_samples is None else num_samples)


@pytest.mark.parametrize(
    ("name", "rows", "measured_ms"),
    [
        # Medians of steps in recorded traces.
        ("h200-8b", [(512, 1)], 3.87),
        ("h200-8b", [(640, 1)] * 32, 5.05),
        ("h200-8b", [(600, 1)] * 128, 7.75),
        ("h200-8b", [(0, 128)], 5.53),
        ("h200-8b", [(0, 8000)], 207.0),
        ("h200-0.6b", [(640, 1)] * 32, 1.33),
        ("h200-0.6b", [(600, 1)] * 128, 2.98),
        ("h200-0.6b", [(0, 128)], 1.42),
        ("h200-0.6b", [(0, 8000)], 24.4),
    ],
)
def test_profiles_have_the_measured_step_times(
    name: str, rows: list[tuple[int, int]], measured_ms: float
) -> None:
    cost = SimCost(SHAPES[name], H200, itemsize=2, profile=shipped(name))
    assert step_ms(cost, rows) == pytest.approx(measured_ms, rel=0.03)


def test_the_roofline_is_near_the_measured_step_times() -> None:
    for rows in ([(512, 1)], [(600, 1)] * 8, [(640, 1)] * 32, [(640, 1)] * 128, [(0, 8000)]):
        measured = SimCost(SHAPES["h200-8b"], H200, itemsize=2, profile=shipped("h200-8b"))
        assert step_ms(COST, rows) == pytest.approx(step_ms(measured, rows), rel=0.16)


def test_chunks_cost_together_what_the_prompt_costs_at_once() -> None:
    whole = step_ms(COST, [(0, 8192)])
    chunks = [step_ms(COST, [(at, 1024)], num_samples=at == 7168) for at in range(0, 8192, 1024)]
    assert chunks == sorted(chunks), "attention to what is cached adds up"
    fixed = 7 * COST.base_seconds * 1e3
    assert sum(chunks) == pytest.approx(whole + fixed, rel=1e-3)


def test_a_few_more_tokens_are_nearly_free_until_arithmetic_is_the_limit() -> None:
    decodes = [(100, 1)] * 8
    alone = step_ms(COST, decodes)
    assert step_ms(COST, [*decodes, (0, 64)]) < 1.05 * alone
    assert step_ms(COST, [*decodes, (0, 2048)]) > 5 * alone


def test_every_row_adds_to_the_cost() -> None:
    rows = [(17, 1), (3000, 1), (0, 700), (512, 33)]
    base = step_ms(COST, [(0, 1)])
    added = [step_ms(COST, [(0, 1), row]) - base for row in rows]
    assert all(cost > 0 for cost in added)


def test_windows_bound_what_layers_see() -> None:
    work = SHAPES["h200-8b"].work(2)
    (all_layers,) = work.attention
    sizes = all_layers.kv_size // 2, all_layers.heads_size // 2
    halves = Attention(1024, *sizes), Attention(math.inf, *sizes)
    half = msgspec.structs.replace(work, attention=halves)
    whole, windowed = Roofline(work, H200), Roofline(half, H200)
    for start, length in ((100, 1), (0, 500), (20_000, 1), (20_000, 500)):
        step = np.array([start]), np.array([length]), 1
        attention = whole.step(*step) - whole.matmuls(length, 1)
        seen = windowed.step(*step) - windowed.matmuls(length, 1)
        assert seen == pytest.approx(attention * (1.0 if start < 1024 else 0.53), rel=0.06)


def spec_of(config: Config) -> ModelSpec:
    return ModelSpec(
        architecture="",
        config=config,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=config.context_length,
        eos_token_ids=(EOS,),
        bos_token_id=None,
        dtype="bfloat16",
        sampling=SamplingDefaults(),
    )


def test_auto_has_the_shape_of_the_model() -> None:
    qwen3_8b = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=12288,
        max_position_embeddings=40960,
    )
    assert shape_of("auto", spec_of(qwen3_8b)) == SHAPES["h200-8b"]
    assert shape_of("h200-0.6b", spec_of(qwen3_8b)) == SHAPES["h200-0.6b"]
    assert SHAPES["h200-8b"].stored_params == pytest.approx(8.19e9, rel=1e-3)
    assert SHAPES["h200-0.6b"].stored_params == pytest.approx(0.596e9, rel=1e-3)


def test_auto_knows_other_families() -> None:
    opt_125m = OPTConfig(
        vocab_size=50272,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=2048,
        ffn_dim=3072,
    )
    assert shape_of("auto", spec_of(opt_125m)).stored_params == pytest.approx(123.5e6, rel=1e-2)

    qwen3_30b_a3b = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        max_position_embeddings=40960,
    )
    shape = shape_of("auto", spec_of(qwen3_30b_a3b))
    assert shape.stored_params == pytest.approx(30.5e9, rel=1e-2)
    cost = SimCost(shape, H200, itemsize=2)
    assert step_ms(cost, [(0, 1)]) < step_ms(cost, [(0, 1)] * 8) < 10 * step_ms(cost, [(0, 1)])
    # Of 128 experts, 32 tokens that choose 8 at random need 112.
    assert cost.matmuls(32, 32) - cost.matmuls(0, 0) == pytest.approx(
        cost.expert_seconds * (1 - (1 - 8 / 128) ** 32)
    )


def test_quantised_weights_take_what_they_take() -> None:
    spec = msgspec.structs.replace(
        spec_of(
            GptOssConfig(
                vocab_size=201088,
                hidden_size=2880,
                intermediate_size=2880,
                num_hidden_layers=36,
                num_attention_heads=64,
                max_position_embeddings=131072,
            )
        ),
        quantization=Quantization(method="mxfp4"),
    )
    shape = shape_of("auto", spec)
    cost = SimCost(shape, H200, itemsize=2)
    assert shape.stored_params == pytest.approx(116.8e9, rel=1e-3)
    assert cost.weight_bytes == pytest.approx(65.2e9, rel=2e-3), "as on the hub"
    assert SimCost(shape, H200, itemsize=4).weight_bytes == 4 * shape.stored_params


def test_limits_come_from_the_profile() -> None:
    spec = read_spec(demo.path())

    async def limits_of(**options: Any) -> EngineLimits:
        config = EngineConfig(device="sim", **options)
        return await build_sim(config, spec).start()

    large = asyncio.run(limits_of(sim_profile="h200-8b"))
    capacity = (0.9 * H200.memory - 2 * SHAPES["h200-8b"].stored_params) / 147456
    assert large.num_pages == int(capacity / 16)
    assert 16 * large.num_pages == pytest.approx(790_608, rel=0.005), "as recorded"
    assert large.max_model_len == 40960
    assert large.vocab_size == spec.vocab_size
    assert large.eos_token_ids == spec.eos_token_ids
    assert (large.device, large.dtype) == ("sim", "bfloat16")
    assert large.max_num_batched_tokens == 8192
    assert large.page_copy_seconds == pytest.approx(16 * 147456 / 50e9)

    own = asyncio.run(limits_of(kv_cache_tokens=4096, host_kv_gib=0.5))
    assert own.num_pages == 256
    assert own.max_model_len == spec.max_position_embeddings
    assert own.host_pages == 2**29 // (16 * spec.kv_bytes_per_token(2))
    with pytest.raises(ModelError, match="kv_cache_tokens"):
        asyncio.run(limits_of(sim_profile="h200-8b", kv_cache_tokens=2_000_000))
