"""Captured steps against steps launched kernel by kernel."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, Completion, SamplingParams
from asyncllm.executor import worker as worker_module
from asyncllm.executor.step.graph_kinds import Kind
from asyncllm.executor.step.graphs import GraphedForward
from asyncllm.executor.step.padded_steps import PaddedSteps
from tests.support.models import tiny_models

pytestmark = pytest.mark.gpu

#: How decode rows may be sampled: by a graph of each level, and outside of graphs.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "draw": {"temperature": 0.8},
    "filter": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "eager": {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
}


def workload(count: int, **params: Any) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of very different lengths, outputs too."""
    rng = random.Random(count)
    return [
        (
            [rng.randrange(4, 300) for _ in range(rng.choice([1, 3, 17, 40, 90, 200]))],
            SamplingParams(seed=i, max_tokens=rng.randint(1, 40), ignore_eos=True, **params),
        )
        for i in range(count)
    ]


async def answers(
    folder: Path | None, requests: list[tuple[list[int], SamplingParams]], **options: Any
) -> list[Completion]:
    async with AsyncLLM(folder, device="cuda", max_model_len=256, **options) as llm:
        return list(await asyncio.gather(*(llm.generate(*request) for request in requests)))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
async def test_graphs_equal_eager_steps(family: str, folder_of: Callable[[str], Path]) -> None:
    """In float32, where no rounding decides; rows in numbers that fill no bucket."""
    requests = workload(13, temperature=0.0)
    options = {"dtype": "float32", "max_num_seqs": 32}
    graphs = await answers(folder_of(family), requests, **options)
    eager = await answers(folder_of(family), requests, cuda_graphs=False, **options)
    assert tokens(graphs) == tokens(eager)


@pytest.mark.parametrize("sampling", SAMPLING)
async def test_graphs_of_every_sampling_level(
    sampling: str, folder_of: Callable[[str], Path]
) -> None:
    requests = workload(11, **SAMPLING[sampling])
    options = {"dtype": "float32", "max_num_seqs": 16}
    folder = folder_of("qwen3")
    graphs = await answers(folder, requests, **options)
    eager = await answers(folder, requests, cuda_graphs=False, **options)
    assert tokens(graphs) == tokens(eager)


async def test_overlap_multi_step_and_batching_do_not_show(
    folder_of: Callable[[str], Path],
) -> None:
    requests = workload(24, temperature=0.7)
    folder = folder_of("qwen3")
    options = {"dtype": "float32"}
    expected = tokens(await answers(folder, requests, **options))
    for changed in (
        {"steps_in_flight": 1},
        {"max_decode_steps": 1},
        {"max_decode_steps": 3, "page_size": 2},
        {"max_num_seqs": 5},
        {"prefill_chunk": 16},
        {"kv_cache_tokens": 1024, "page_size": 4},
    ):
        assert tokens(await answers(folder, requests, **options, **changed)) == expected, changed


async def test_mixed_sampling_in_one_batch(folder_of: Callable[[str], Path]) -> None:
    """What a row's batch mates ask for does not change its own text."""
    folder = folder_of("qwen3")
    options = {"dtype": "float32", "max_num_seqs": 32}
    kinds = [workload(6, **params) for params in SAMPLING.values()]
    alone = [tokens(await answers(folder, requests, **options)) for requests in kinds]
    together = await answers(folder, [r for requests in kinds for r in requests], **options)
    assert tokens(together) == [ids for part in alone for ids in part]


def noted_captures(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """The graphs that are captured from now on, as they come."""
    captured: list[Kind] = []
    capture = GraphedForward._capture

    def noted(self: GraphedForward, kind: Kind) -> None:
        capture(self, kind)
        captured.append(kind)

    monkeypatch.setattr(GraphedForward, "_capture", noted)
    return captured


async def steady(captured: list[Kind]) -> None:
    """Wait until nothing has been captured for half a second."""
    before = -1
    while before != len(captured):
        before = len(captured)
        await asyncio.sleep(0.5)


@pytest.mark.parametrize("max_num_seqs", [1, 5, 40])
async def test_an_idle_engine_captures_everything_that_it_will_ever_need(
    max_num_seqs: int, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = noted_captures(monkeypatch)
    memory: list[int] = []
    folder = folder_of("qwen3")
    async with AsyncLLM(folder, device="cuda", max_model_len=256, max_num_seqs=max_num_seqs) as llm:
        assert captured
        first = len(captured)
        await steady(captured)
        assert first <= len(captured) == len(set(captured))
        before = list(captured)
        for _ in range(2):
            for params in SAMPLING.values():
                requests = workload(24, **params)
                await asyncio.gather(*(llm.generate(*request) for request in requests))
            memory.append(torch.cuda.memory_reserved())
    assert captured == before
    assert memory[0] == memory[1]


async def test_steps_run_before_their_graphs_are_captured(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are padded more, or replay a graph several times."""
    folder = folder_of("qwen3")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 40}
    requests = [r for params in SAMPLING.values() for r in workload(9, **params)]
    expected = tokens(await answers(folder, requests, cuda_graphs=False, **options))
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 60.0)
    captured = noted_captures(monkeypatch)
    few = tokens(await answers(folder, requests, **options))
    assert few == expected
    monkeypatch.setattr(worker_module, "BUSY_SECONDS", 0.0)
    first = len(captured)
    del captured[:]
    meanwhile = tokens(await answers(folder, requests, **options))
    assert meanwhile == expected
    assert len(captured) > first


async def test_a_capture_without_memory_leaves_the_graphs_that_there_are(
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = folder_of("qwen3")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 40}
    requests = [r for params in SAMPLING.values() for r in workload(9, **params)]
    expected = tokens(await answers(folder, requests, cuda_graphs=False, **options))
    captured = noted_captures(monkeypatch)
    run = PaddedSteps.run
    async with AsyncLLM(folder, device="cuda", max_model_len=256, **options) as llm:

        def full(self: PaddedSteps, *args: Any) -> Any:
            result = run(self, *args)
            if torch.cuda.is_current_stream_capturing():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return result

        monkeypatch.setattr(PaddedSteps, "run", full)
        await steady(captured)
        count = len(captured)
        done = await asyncio.gather(*(llm.generate(*request) for request in requests))
        await steady(captured)
    assert len(captured) == count
    assert tokens(list(done)) == expected
    assert "no other can be captured" in caplog.text


@pytest.mark.parametrize(
    ("attention", "variants"),
    [
        ("triton", [{}, {"cuda_graphs": False}]),
        (
            "flashinfer",
            [
                {},
                {"cuda_graphs": False},
                {"steps_in_flight": 1},
                {"max_decode_steps": 3, "page_size": 4},
                {"max_num_seqs": 5, "prefill_chunk": 16},
            ],
        ),
    ],
)
async def test_bfloat16_text_does_not_depend_on_graphs(
    attention: str, variants: list[dict[str, Any]]
) -> None:
    """The demo model is sure of its sums."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    questions = [[{"role": "user", "content": f"What is {n} + 45?"}] for n in range(20, 60)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = []
    for options in variants:
        async with AsyncLLM(device="cuda", attention=attention, **options) as llm:
            done = await asyncio.gather(*(llm.generate(q, params) for q in questions))
        texts.append([completion.text for completion in done])
    assert all(found == texts[0] for found in texts)
    assert all(str(n + 45) in text for n, text in zip(range(20, 60), texts[0], strict=True))
