"""Quantised checkpoints on a GPU: kept as they are, and as exact as their kernels."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import AsyncLLM, Completion, SamplingParams
from asyncllm.models.base import CausalLM
from asyncllm.models.loading import loader
from asyncllm.models.loading.allocate import Kept, can_keep
from asyncllm.models.loading.loader import load_model
from asyncllm.models.quant.weight import QuantizedWeight
from asyncllm.models.spec import read_spec
from tests.support.models import quantized
from tests.support.models.dense_attention import DenseBackend, step
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
PROMPTS = [[(7 * i + n) % 380 + 4 for i in range(n)] for n in (1, 5, 40, 200)]


@pytest.fixture(autouse=True)
def small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights here are small, and would be expanded where 16 bits are faster."""

    def keep(*args: Any) -> Kept:
        found = can_keep(*args)
        return "all" if found == "large" else found

    monkeypatch.setattr(loader, "can_keep", keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", quantized.FORMATS)
def test_logits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, dense = quantized.make(name, tmp_path, **SIZES)
    model, expected = _load(folder, dtype), _load(dense, dtype)
    kept = [part for part in model.modules() if isinstance(part, QuantizedWeight)]
    quantization = read_spec(folder).quantization
    assert quantization is not None
    takes = can_keep(quantization, dtype, torch.device("cuda", 0)) in ("all", "large")
    assert takes or name in ("compressed-tensors", "fp8-blocks", "fp8")
    assert len(kept) == takes * (10 if name in ("compressed-tensors", "fp8-blocks") else 12)
    # With many rows fp8 rounds activations, too, to 4 bits of precision.
    rounded = name.startswith(("compressed-tensors", "fp8"))
    for ids in PROMPTS:
        error = _logits(model, ids) - _logits(expected, ids)
        tolerance = 0.2 if rounded and len(ids) > 16 else 0.03
        relative = error.std() / _logits(expected, ids).std()
        assert relative < tolerance, (len(ids), relative)


def test_float32_is_dequantised(tmp_path: Path) -> None:
    folder, dense = quantized.make("gptq-ordered", tmp_path, **SIZES)
    wanted = _load(dense, torch.float32).state_dict()
    for name, tensor in _load(folder, torch.float32).state_dict().items():
        assert torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-tensors", "awq"])
async def test_served(name: str, tmp_path: Path) -> None:
    folder, dense = quantized.make(name, tmp_path, **SIZES)
    got, expected = await _serve(folder), await _serve(dense)
    for one, other in zip(got, expected, strict=True):
        assert len(one.token_ids) == len(other.token_ids) == 8
        assert one.logprobs is not None
        assert other.logprobs is not None
        best = dict(other.logprobs[0].top)
        near = [abs(best[token] - value) for token, value in one.logprobs[0].top if token in best]
        assert near
        assert max(near) < 1.5  # fp8 rounds the activations of these rows, too


async def _serve(folder: Path) -> list[Completion]:
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, ignore_eos=True)
    async with AsyncLLM(folder, device="cuda", gpu_memory_utilization=0.3) as llm:
        return list(await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS)))


def _load(folder: Path, dtype: torch.dtype) -> CausalLM:
    return load_model(folder, read_spec(folder), dtype, "cuda")


def _logits(model: CausalLM, ids: list[int]) -> Tensor:
    with torch.device("cuda"):
        [logits] = step(model, DenseBackend(), [(0, 0, ids)])
    return logits.float()
