"""Models on any GPU of several: ``pytest -m gpu tests/gpu/test_second_gpu.py`` where there are two.

Kernels, graphs, streams and pinned memory all take the current device of the thread that launches
them: a forgotten one shows as a crash, as wrong tokens, or as memory taken on the first GPU.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, Completion, ModelError, SamplingParams
from tests.support.models import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

#: Without a target for steps: with one, measured times decide where a prompt is cut, and bfloat16
#: rounds the sums of another cut differently.
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.3,
    "host_kv_gib": 0.5,
    "itl_target_ms": 0,
}


async def answers(device: str, model: Path | None, **options: Any) -> list[Completion]:
    """Greedy, sampled, penalised and scored answers, one at a time.

    Then all at once, which no two runs do in the same steps: these only have to be complete.
    """
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.8, top_k=20, seed=2, presence_penalty=0.5),
        SamplingParams(max_tokens=40, temperature=0.0, logprobs=3, bad_words=("a",)),
    ]
    prompts = [list(range(5, 5 + length)) for length in (3, 40, 200)]
    async with AsyncLLM(model, device=device, **OPTIONS, **options) as llm:
        requests = [(prompt, each) for prompt in prompts for each in params]
        alone = [await llm.generate(*request) for request in requests]
        together = await asyncio.gather(*(llm.generate(*request) for request in requests))
        assert all(answer.token_ids and answer.finish_reason for answer in together)
        return alone


def in_use(index: int) -> int:
    free, total = torch.cuda.mem_get_info(index)
    return total - free


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
async def test_the_second_gpu_gives_the_same_tokens(attention: str, cuda_graphs: bool) -> None:
    options = {"attention": attention, "cuda_graphs": cuda_graphs}
    first = await answers("cuda:0", None, **options)
    second = await answers("cuda:1", None, **options)
    assert [answer.token_ids for answer in second] == [answer.token_ids for answer in first]


async def test_the_first_gpu_is_left_alone() -> None:
    torch.cuda.mem_get_info(0)  # makes the context that counts as taken
    taken = torch.cuda.memory_reserved(0)
    used = in_use(0)
    async with AsyncLLM(device="cuda:1", **OPTIONS) as llm:
        await llm.generate("1, 2, 3,", SamplingParams(max_tokens=20))
        assert torch.cuda.memory_reserved(1) > 2**30
        assert torch.cuda.memory_reserved(0) == taken
        if "PYTEST_XDIST_WORKER" not in os.environ:  # nobody else uses it
            assert in_use(0) - used < 2**28


async def test_a_bin_checkpoint_streams_to_the_second_gpu(tmp_path: Path) -> None:
    folder = tiny_models.make("opt", tmp_path / "opt", dtype=torch.bfloat16)
    tokenizer = _demo()
    expected = await answers("cuda:0", folder, tokenizer=tokenizer, kv_cache_tokens=4096)
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = await answers("cuda:1", folder, tokenizer=tokenizer, kv_cache_tokens=4096)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


async def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"cuda:99: this machine has \d+ CUDA device"):
        await AsyncLLM(device="cuda:99").start()


def _demo() -> str:
    from asyncllm import demo

    return str(demo.path())
