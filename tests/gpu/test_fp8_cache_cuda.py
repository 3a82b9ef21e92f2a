"""A KV cache in 8 bits on a GPU: every kind of kernels, with graphs and without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.attention.flashinfer.library import find_nvcc, installed
from asyncllm.kernels.gpu import gpu_of
from tests.support.models import tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not gpu_of(0).has_fp8, reason="needs a GPU with fp8"
    ),
]

#: Heads of 128, for which there are kernels for Hopper; of 64 with sinks and windows.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 8},
    "gpt_oss": {"hidden_size": 256, "head_dim": 64},
}
PROMPTS = [[(7 * i + 3 * n) % 380 + 4 for i in range(n)] for n in (1, 17, 40, 200, 700)]
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny_models.make(request.param, made, std=0.05, **MODELS[request.param])
    (made / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    return made


async def _scores(folder: Path, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of the prompts' tokens, and of those that are generated after them."""
    share: dict[str, Any] = {"device": "cuda", "gpu_memory_utilization": 0.3, "max_model_len": 1000}
    async with AsyncLLM(folder, **share, **options) as llm:
        answers = await asyncio.gather(*(llm.generate(ids, GREEDY) for ids in PROMPTS * 8))
        done = await asyncio.gather(*(llm.generate(ids, SCORED) for ids in PROMPTS))
    scores = [score.logprob for one in done for score in one.prompt_logprobs or () if score]
    decoded = [[entry.logprob for entry in one.logprobs or ()] for one in answers]
    return np.array(scores), np.array(decoded)


@pytest.mark.parametrize("attention", ["triton", "sdpa", "flashinfer"])
async def test_scores_are_near_those_with_16_bits(folder: Path, attention: str) -> None:
    if attention == "flashinfer" and (not installed() or find_nvcc() is None):
        pytest.skip("needs FlashInfer and nvcc")
    exact, _ = await _scores(folder, attention="triton")
    rounded, decoded = await _scores(folder, attention=attention, kv_cache_dtype="fp8")
    errors = np.abs(exact - rounded)
    assert 0 < errors.mean() < 0.05
    assert np.quantile(errors, 0.99) < 0.3
    assert np.isfinite(decoded).all()


async def test_graphs_change_nothing_but_the_last_bits(folder: Path) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention": "triton"}
    _, captured = await _scores(folder, **options)
    _, launched = await _scores(folder, **options, cuda_graphs=False, max_decode_steps=1)
    assert np.abs(captured[:, :4] - launched[:, :4]).mean() < 0.05


async def test_answers_survive_the_host_tier(folder: Path) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "attention": "triton"}
    tier = {"kv_cache_tokens": 1600, "host_kv_gib": 0.05, "max_num_seqs": 64}
    _, expected = await _scores(folder, **options)
    _, found = await _scores(folder, **options, **tier)
    assert np.abs(expected[:, :4] - found[:, :4]).mean() < 0.05
