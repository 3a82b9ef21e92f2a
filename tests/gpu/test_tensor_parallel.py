"""Ranks on GPUs: ``pytest -m gpu tests/gpu/test_tensor_parallel.py`` where there are two.

That shares are exact is tested on CPUs. These tests are of what is different on GPUs: NCCL, our own
sums, both inside graphs, GPUs that wait for each other, and memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import EngineDead
from asyncllm.executor.step.graphs import GraphedForward
from tests.cpu.team.test_equality import _everything
from tests.support.models import tiny_models
from tests.support.models.reference import GREEDY, answers, check
from tests.support.team.ranks import peers
from tests.support.text import tokenizers as tokenizers_for_tests

pytest.importorskip("triton")

from asyncllm.parallel.push import PushCollectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FLOAT32: dict[str, Any] = {"device": "cuda", "dtype": "float32", "gpu_memory_utilization": 0.3}
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


def memory_used() -> list[int]:
    free_and_total = [torch.cuda.mem_get_info(i) for i in range(2)]
    return [(total - free) >> 20 for free, total in free_and_total]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "olmo2", "qwen3_moe", "gemma3"])
async def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, graphs: bool, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    async with AsyncLLM(folder, **FLOAT32, tp=2, cuda_graphs=graphs) as llm:
        expected = answers(folder)
        for _ in range(2):
            together = await asyncio.gather(*(llm.generate(a.prompt, GREEDY) for a in expected))
            for completion, answer in zip(together, expected, strict=True):
                check(completion, answer)
        assert llm.stats.pages_held == 0
    assert peers() == []


@pytest.mark.parametrize("pushes", [True, False])
async def test_bfloat16_text_is_that_of_one_rank(
    pushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model is sure of its sums."""
    if not pushes:
        monkeypatch.setenv("ASYNCLLM_PRETEND_CAPABILITY", "7.5")
    questions = [[{"role": "user", "content": f"What is {n} + 45?"}] for n in range(20, 60)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = []
    for size in (1, 2):
        async with AsyncLLM(device="cuda", dtype="bfloat16", tp=size) as llm:
            done = await asyncio.gather(*(llm.generate(q, params) for q in questions))
        texts.append([completion.text for completion in done])
    assert texts[0] == texts[1]


async def test_everything_that_can_be_asked() -> None:
    found = []
    for size in (1, 2):
        async with AsyncLLM(device="cuda", dtype="float32", tp=size) as llm:
            found.append(await _everything(llm))
    for name in ("sampled", "structured", "beams"):
        assert found[0][name] == found[1][name], name


async def test_small_sums_are_pushed_inside_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says what it does: it captures, and never asks NCCL for a sum of a few rows."""
    sums: list[tuple[int, ...]] = []
    monkeypatch.setattr(PushCollectives, "sum", _counting(PushCollectives.sum, sums))
    captured: list[int] = []
    original = GraphedForward._capture

    def capture(self: Any, kind: Any) -> None:
        original(self, kind)
        captured.append(self.count)

    monkeypatch.setattr(GraphedForward, "_capture", capture)
    with caplog.at_level(logging.INFO, "asyncllm.parallel"):
        async with AsyncLLM(device="cuda", dtype="bfloat16", tp=2) as llm:
            await llm.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True))
    assert captured
    assert any(rows == 1 for rows, _ in sums)
    assert "NCCL alone" not in caplog.text


def _counting(function: Any, shapes: list[tuple[int, ...]]) -> Any:
    def counted(self: Any, x: torch.Tensor, residual: Any) -> Any:
        shapes.append(tuple(x.shape))
        return function(self, x, residual)

    return counted


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_leaves_nobody_waiting_on_a_gpu(
    sent: signal.Signals, graphs: bool
) -> None:
    before = memory_used()
    async with AsyncLLM(device="cuda", dtype="bfloat16", tp=2, cuda_graphs=graphs) as llm:
        streams = [asyncio.create_task(llm.generate(f"{i} and", LONG)) for i in range(4)]
        await asyncio.sleep(0.3)
        assert not any(stream.done() for stream in streams)
        [peer] = peers()
        started = time.monotonic()
        os.kill(peer.pid, sent)
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - started < 5.0
        assert all(isinstance(error, EngineDead) for error in errors), errors
        assert "rank 1" in str(errors[0])
    assert peers() == []
    # This process keeps its context, and the rank's memory is free at once.
    assert memory_used()[1] <= before[1] + 700
    async with AsyncLLM(device="cuda", dtype="bfloat16", tp=2) as llm:  # the GPUs can be used
        assert await llm.generate("Hello", SamplingParams(max_tokens=5))


async def test_large_sums_of_prompts_go_through_nccl(tmp_path: Path) -> None:
    """They come between those that are pushed."""
    sizes = {"hidden_size": 2048, "intermediate_size": 2048, "max_position_embeddings": 4096}
    folder = tiny_models.make("qwen3", tmp_path, **sizes)
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    prompts = [[(7 * i + n) % 380 + 4 for i in range(n)] for n in (3, 40, 700, 1900, 5)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    found = []
    for size in (1, 2):
        async with AsyncLLM(folder, **FLOAT32, tp=size) as llm:
            done = await asyncio.gather(*(llm.generate(p, params) for p in prompts))
            found.append([completion.token_ids for completion in done])
    assert found[0] == found[1]
