"""``--kv-cache-dtype fp8``: answers with a KV cache in 8 bits."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm import AsyncLLM, Completion, SamplingParams, demo
from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor.build import build_worker
from asyncllm.executor.choose_device import cache_dtype
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.kv_scales import kv_scales, scale_of
from asyncllm.executor.sim.executor import resolve_sim
from asyncllm.kernels.gpu import Gpu
from asyncllm.models.loading.kv_scales import read_kv_scales
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Alone, Apart
from tests.cpu.llm.test_parity import expect_short_outputs
from tests.support.models.reference import GREEDY, NEW_TOKENS, answers
from tests.support.server.polling import pages_are_released

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}
FP8: dict[str, Any] = {**OPTIONS, "kv_cache_dtype": "fp8"}
#: Windows, soft caps, sinks, keys that are values, layers that share K and V, recurrent states.
FAMILIES = ("opt", "llama", "gemma2", "gpt_oss", "gemma4", "gemma4_unified", "qwen3_next")
#: How the engine may run without any token changing.
MODES: dict[str, dict[str, Any]] = {
    "chunks of 16": {"prefill_chunk": 16},
    "no prefix cache, multi-step of 3": {"prefix_caching": False, "max_decode_steps": 3},
    "preempting": {"kv_cache_tokens": 480, "page_size": 2, "max_model_len": 270},
    "host tier": {"kv_cache_tokens": 320, "page_size": 4, "host_kv_gib": 0.01},
    "two ranks": {"tp": 2},
}


async def _answers(llm: AsyncLLM, prompts: Sequence[list[int]]) -> list[Completion]:
    return list(await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts)))


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_near_those_of_a_cache_in_full_precision(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    prompts = [answer.prompt for answer in answers(folder)]
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = []
    for options in (OPTIONS, FP8):
        async with AsyncLLM(folder, **options) as llm:
            done = await asyncio.gather(*(llm.generate(prompt, scored) for prompt in prompts))
            scores = [score for one in done for score in one.prompt_logprobs or () if score]
            found.append(np.array([score.logprob for score in scores]))
    error = np.abs(found[0] - found[1])
    assert 0 < error.mean() < 0.1
    assert np.quantile(error, 0.99) < 0.5


@pytest.mark.parametrize(
    ("family", "mode"),
    [*(("llama", mode) for mode in MODES), ("gpt_oss", "preempting"), ("gpt_oss", "host tier")],
)
async def test_cached_and_preempted_answers_are_those_of_computing_again(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    prompts = [a.prompt for a in answers(folder) if len(a.prompt) <= 270 - NEW_TOKENS]
    async with AsyncLLM(folder, **FP8) as llm:
        expected = [await llm.generate(prompt, GREEDY) for prompt in prompts]
    async with AsyncLLM(folder, **{**FP8, **MODES[mode]}) as llm:
        if mode == "preempting":
            expect_short_outputs(llm)
        for turn in range(10):
            found = await _answers(llm, prompts)
            for one, other in zip(found, expected, strict=True):
                assert one.token_ids == other.token_ids
                pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
                assert all(abs(a.logprob - b.logprob) < 0.05 for a, b in pairs)
            if turn and (mode != "host tier" or llm.stats.host_cached_tokens):
                break
        await pages_are_released(llm)
        assert mode == "host tier" or (llm.stats.preemptions > 0) == (mode == "preempting")
        assert mode != "host tier" or llm.stats.host_cached_tokens > 0


def test_twice_the_tokens_of_16_bits_fit(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    spec = read_spec(folder)
    sizes = {"host_kv_gib": 2**-7, "max_model_len": 64, "kv_cache_tokens": 4096}
    pages = {}
    for cache in ("auto", "fp8_e4m3"):
        options = {**OPTIONS, "dtype": "bfloat16", "kv_cache_dtype": cache, **sizes}
        worker = build_worker(EngineConfig(model=str(folder), **options), folder, spec)
        pages[cache] = worker.limits.host_pages
    assert pages["fp8_e4m3"] == 2 * pages["auto"] == 2**23 // (16 * spec.kv_bytes_per_token(1))


def _with_tensors(folder: Path, source: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy of a checkpoint with further tensors."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    return folder


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
async def test_scales_of_the_checkpoint_are_used(
    k_name: str, v_name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    at = "model.layers.{}.self_attn.{}"
    of_heads = torch.tensor([0.25, 3.0]).view(2, 1, 1)
    tensors = {
        at.format(0, k_name): torch.tensor(0.02),
        at.format(0, v_name): torch.tensor([0.5]),
        at.format(1, k_name): of_heads.bfloat16(),
        at.format(1, v_name): of_heads.flatten() * 2,
        at.format(1, "q_scale"): torch.tensor(1.0),
        at.format(1, "prob_output_scale"): torch.tensor(1.0),
        at.format(2, k_name): torch.tensor(0.02),  # without that of values
    }
    folder = _with_tensors(tmp_path / "model", folder_of("llama"), tensors)
    specs = load_model(folder, read_spec(folder), torch.float32, "cpu").attention_specs
    found = read_kv_scales(folder, specs, Alone())
    assert {layer: [part.tolist() for part in pair] for layer, pair in found.items()} == {
        0: [pytest.approx([0.02, 0.02]), [0.5, 0.5]],
        1: [[0.25, 3.0], [0.5, 6.0]],
    }
    halves = [replace(spec, num_heads=2, num_kv_heads=1) for spec in specs]
    for rank, expected in ((0, 0.25), (1, 3.0)):
        assert read_kv_scales(folder, halves, Apart(rank, 2))[1][0].tolist() == [expected]
    for rank, expected in ((1, 0.25), (2, 3.0)):  # two ranks have the same head
        assert read_kv_scales(folder, halves, Apart(rank, 4))[1][0].tolist() == [expected]
    used = _scales_of(folder)
    assert used[0].tolist() == [pytest.approx([0.02, 0.02]), [0.5, 0.5]]
    assert used[2].log2().frac().count_nonzero() == 0, "measured"
    async with AsyncLLM(folder, **OPTIONS) as llm:  # and not needed
        prompt = answers(folder_of("llama"))[3]
        assert (await llm.generate(prompt.prompt, GREEDY)).token_ids == prompt.tokens


def test_one_scale_for_keys_and_values(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor(0.5) for i in range(3)}
    folder = _with_tensors(tmp_path / "model", folder_of("llama"), tensors)
    assert all(bool((scales == 0.5).all()) for scales in _scales_of(folder).values())


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (torch.tensor(0.0), "the scale 0, which is not a finite number above 0"),
        (torch.tensor([1.0, torch.nan]), "the scale nan, which is not a finite number above 0"),
        (torch.tensor([torch.inf, 1.0]), "the scale inf, which is not a finite number above 0"),
        (torch.ones(3), "3 scales, which do not fit 2 heads"),
    ],
)
def test_broken_scales_are_refused(
    scales: Tensor, words: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = {f"model.layers.1.self_attn.{kind}_scale": scales.clone() for kind in "kv"}
    folder = _with_tensors(tmp_path / "model", folder_of("llama"), tensors)
    with pytest.raises(ModelError, match=words):
        _scales_of(folder)


@pytest.mark.parametrize(("count", "heads"), [(2, 2), (6, 2), (0, 2), (0, 1)])
def test_scales_that_do_not_fit_the_heads_are_refused_by_each_of_two_ranks(
    count: int, heads: int, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = {f"model.layers.1.self_attn.{kind}_scale": torch.ones(count) for kind in "kv"}
    folder = _with_tensors(tmp_path / "model", folder_of("llama"), tensors)
    specs = load_model(folder, read_spec(folder), torch.float32, "cpu").attention_specs
    own = [replace(spec, num_heads=4, num_kv_heads=heads) for spec in specs]
    for rank in range(2):
        with pytest.raises(ModelError, match=f"{count} scales, which do not fit {2 * heads} heads"):
            read_kv_scales(folder, own, Apart(rank, 2))


def _scales_of(folder: Path) -> dict[int, Tensor]:
    spec, device = read_spec(folder), CpuDevice()
    model = load_model(folder, spec, torch.float32, "cpu")
    with torch.inference_mode():
        source = model, folder, spec.vocab_size, 512
        return kv_scales(*source, torch.float32, device, Alone())


def test_measured_scales_leave_room_and_are_powers_of_two(folder_of: Callable[[str], Path]) -> None:
    scales = _scales_of(folder_of("gemma4"))
    again = _scales_of(folder_of("gemma4"))
    assert all(torch.equal(again[layer], found) for layer, found in scales.items())
    assert all(bool((found.log2().frac() == 0).all()) for found in scales.values())
    heads = torch.zeros(2, 3, 4, 8)
    heads[1, 2, 0, 5], heads[0, 0, 1, 0], heads[1, 1, 3, 3] = -56.0, 57.0, torch.inf
    assert scale_of(heads).tolist() == [1.0, 2.0, 1.0, 1.0]


def test_other_types_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadRequest, match="fp8_e5m2") as refused:
        EngineConfig(kv_cache_dtype="fp8_e5m2")  # type: ignore[arg-type]
    assert refused.value.param == "kv_cache_dtype"
    with pytest.raises(SystemExit):
        main(["serve", "--kv-cache-dtype", "fp8_e5m2"])
    assert "'fp8_e5m2' is not one of auto, fp8, fp8_e4m3" in capsys.readouterr().err


def test_a_gpu_without_8_bits_is_refused() -> None:
    config = EngineConfig(kv_cache_dtype="fp8")
    for gpu in (None, Gpu((8, 9), "L4", 58)):
        assert cache_dtype(config, torch.bfloat16, gpu) == torch.float8_e4m3fn
    with pytest.raises(ModelError, match="capability 8") as refused:
        cache_dtype(config, torch.bfloat16, Gpu((8, 6), "A10", 72))
    assert refused.value.param == "kv_cache_dtype"


def test_the_simulated_cache_holds_twice_the_tokens() -> None:
    spec = read_spec(demo.path())
    base: dict[str, Any] = {"device": "sim", "sim_profile": "h200-8b"}
    (of_16, cost_of_16), (of_8, cost_of_8) = (
        resolve_sim(EngineConfig(**base, kv_cache_dtype=kind), spec) for kind in ("auto", "fp8")
    )
    assert of_8.num_pages in (2 * of_16.num_pages, 2 * of_16.num_pages + 1)
    assert cost_of_16.copy_seconds(8, 16) == 2 * cost_of_8.copy_seconds(8, 16)
