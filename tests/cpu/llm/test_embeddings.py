"""Embeddings against the hidden states of transformers in float32, however they are computed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from asyncllm import LLM, AsyncLLM, EmbeddingParams
from asyncllm.engine.pooling import PooledParams
from asyncllm.errors import BadRequest, QueueFull, StepError
from asyncllm.executor.runner import ModelRunner, Ticket
from asyncllm.types import Pooling, Prompt
from asyncllm.wire.messages import StepResult
from examples.embeddings import nearest
from tests.cpu.executor.test_prompt_logprobs import LENGTHS, PLAIN, SCORE_AND_GO, prompt_of
from tests.cpu.executor.test_prompt_logprobs import check as check_scores
from tests.cpu.llm.test_library import idle, until
from tests.support.models import tiny_models
from tests.support.models.preempting import answer_of_a_preempted
from tests.support.text import tokenizers as tokenizers_for_tests

POOLINGS: tuple[Pooling, ...] = ("last", "mean")

#: How the engine may run without any number changing.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 1": {"prefill_chunk": 1},
    "chunks of 16": {"prefill_chunk": 16, "page_size": 4},
    "small steps": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "no overlap": {"steps_in_flight": 1, "prefix_caching": False},
}


@lru_cache
def states_of(folder: Path, prompt: tuple[int, ...]) -> np.ndarray:
    """float64 [tokens, hidden_size]: after the last norm."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    array: np.ndarray = states.double().numpy()
    return array


def expected(folder: Path, prompt: list[int], pooling: Pooling) -> np.ndarray:
    states = states_of(folder, tuple(prompt))
    pooled: np.ndarray = states[-1] if pooling == "last" else states.mean(axis=0)
    return pooled


def check(vector: np.ndarray, folder: Path, prompt: list[int], pooling: Pooling) -> None:
    """Of length 1."""
    right = expected(folder, prompt, pooling)
    right = right / np.linalg.norm(right)
    assert vector.dtype == np.float32
    np.testing.assert_allclose(vector, right, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("llama", mode) for mode in MODES),
        *((family, "chunks of 16") for family in ("qwen3", "gemma2", "gemma3", "opt")),
        ("opt", "default"),
    ],
)
async def test_they_equal_transformers(
    family: str, mode: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **MODES[mode]}
    async with AsyncLLM(folder, **options) as llm:
        prompts = [prompt_of(length) for length in LENGTHS]
        for prompt in prompts:
            # The second time all of it is cached, which must not matter.
            for pooling in (*POOLINGS, *POOLINGS):
                vector = await llm.embed(prompt, pooling=pooling)
                assert vector.shape == (llm.limits.embedding_size,)
                check(vector, folder, prompt, pooling)
        plain = [await llm.generate(prompt, PLAIN) for prompt in prompts]
        # With each other and with those that generate and are scored, some new to the cache.
        new = [[5, *prompt[1:]] for prompt in prompts]
        vectors = [
            asyncio.create_task(llm.embed(each, pooling=pooling))
            for each in (prompts, new)
            for pooling in POOLINGS
        ]
        scoring = [asyncio.create_task(llm.generate(prompt, SCORE_AND_GO)) for prompt in new]
        answers = await asyncio.gather(*(llm.generate(prompt, PLAIN) for prompt in prompts))
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
        for prompt, scored in zip(new, await asyncio.gather(*scoring), strict=True):
            check_scores(scored.prompt_logprobs, folder, prompt)
        cases = [(each, pooling) for each in (prompts, new) for pooling in POOLINGS]
        for task, (each, pooling) in zip(vectors, cases, strict=True):
            for vector, prompt in zip(await task, each, strict=True):
                check(vector, folder, prompt, pooling)
        await idle(llm)


async def test_an_output_that_is_smaller_than_the_layers(tmp_path: Path) -> None:
    """OPT-350M projects its last hidden state, after its layers' own norms."""
    size = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
    tiny_models.make("opt", tmp_path, **size)
    (tmp_path / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(tmp_path, device="cpu", dtype="float32", cpu_threads=1) as llm:
        assert llm.limits.embedding_size == 32
        check(await llm.embed(prompt_of(20)), tmp_path, prompt_of(20), "last")
        with pytest.raises(BadRequest, match="at most 32"):
            await llm.embed("a", dimensions=33)


async def test_checkpoints_of_the_bare_model(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """As those of Qwen3-Embedding are: no tensor's name begins with ``model.``."""
    folder = folder_of("qwen3")
    AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        assert "embed_tokens.weight" in tensors.keys()  # noqa: SIM118 (it has no iterator)
    tiny_models.edit_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    shutil.copy(folder / "tokenizer.json", tmp_path)
    async with AsyncLLM(tmp_path, device="cpu", dtype="float32", cpu_threads=1) as llm:
        check(await llm.embed(prompt_of(20)), folder, prompt_of(20), "last")


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_a_preempted_prompt_goes_on_where_it_was(
    pooling: Pooling, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("llama")
    pooled = PooledParams(pooling=pooling)
    hidden = (await answer_of_a_preempted(folder, prompt_of(60), pooled)).hidden
    assert hidden is not None
    check(EmbeddingParams().vector(hidden), folder, prompt_of(60), pooling)


async def test_prefixes_are_shared_as_far_as_that_is_right(
    folder_of: Callable[[str], Path],
) -> None:
    prompt = prompt_of(100)
    async with AsyncLLM(folder_of("llama"), device="cpu", cpu_threads=1) as llm:
        cached = 99 // llm.limits.page_size * llm.limits.page_size
        await llm.embed(prompt, pooling="mean")
        assert llm.stats.cached_tokens == 0
        assert llm.stats.prompt_tokens == 100
        assert llm.stats.finished["length"] == 1
        await llm.embed(prompt, pooling="mean")
        assert llm.stats.cached_tokens == 0, "the mean needs all hidden states"
        await llm.embed(prompt)
        assert llm.stats.cached_tokens == cached
        answer = await llm.generate(prompt, PLAIN)
        assert answer.usage.cached_tokens == cached, "whatever computed them"
        # Of equal ones that arrive together, one is computed.
        before = llm.stats.cached_tokens
        same = await llm.embed([[6, *prompt[1:]]] * 4)
        assert llm.stats.cached_tokens == before + 3 * cached
        assert np.abs(same - same[0]).max() < 1e-6


async def test_dimensions_and_length(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    prompt = prompt_of(20)
    async with AsyncLLM(folder, device="cpu", dtype="float32", cpu_threads=1) as llm:
        raw = await llm.embed(prompt, EmbeddingParams(normalize=False))
        np.testing.assert_allclose(raw, expected(folder, prompt, "last"), rtol=1e-4, atol=1e-5)
        short = await llm.embed(prompt, dimensions=10, normalize=False)
        np.testing.assert_allclose(short, raw[:10], rtol=0, atol=1e-5)
        unit = await llm.embed(prompt, dimensions=10)
        np.testing.assert_allclose(unit, raw[:10] / np.linalg.norm(raw[:10]), atol=1e-5)
        mixed: list[Prompt] = [prompt, "a"]
        assert (await llm.embed(mixed, dimensions=10)).shape == (2, 10)
        assert (await llm.embed([])).shape == (0, 64)


async def test_what_is_refused(folder_of: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"cpu_threads": 1, "max_model_len": 100, "max_waiting": 8}
    async with AsyncLLM(folder_of("llama"), device="cpu", **options) as llm:
        for prompts, fields, says in [
            ([5], {"dimensions": 65}, "at most 64"),
            ([5], {"dimensions": 0}, "at least 1"),
            ([5], {"pooling": "max"}, "pooling"),
            ([5], {"size": 3}, "size"),
            ([5] * 101, {}, "context length is 100 tokens"),
            ("a" * 1000, {}, "context length is 100 tokens"),
            (["a"] * 9, {}, "max_waiting, 8"),
            ([[5], []], {}, "empty"),
            ([[5], [1000]], {}, "between 0 and"),
        ]:
            with pytest.raises(BadRequest, match=says):
                await llm.embed(prompts, **fields)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="not both"):
            await llm.embed([5], EmbeddingParams(), dimensions=3)
        await idle(llm)
        assert (await llm.embed([5] * 100)).shape == (64,), "all of the context"


async def test_cancelling_ends_all_prompts(folder_of: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"cpu_threads": 1, "prefill_chunk": 1, "max_waiting": 4}
    async with AsyncLLM(folder_of("llama"), device="cpu", max_num_seqs=2, **options) as llm:
        task = asyncio.create_task(llm.embed([prompt_of(300)] * 4, pooling="mean"))
        await until(lambda: llm.stats.steps > 3)
        with pytest.raises(QueueFull):
            await llm.embed([prompt_of(10)] * 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(llm)
        assert llm.stats.finished["abort"] == 4


async def test_a_failing_step_fails_them(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    collect = ModelRunner.collect
    broken = asyncio.Event()

    def collect_not_finite(self: ModelRunner, ticket: Ticket) -> StepResult:
        pooled = None if ticket.readback is None else ticket.readback.pooled.packed
        if pooled is not None and broken.is_set():
            pooled[:] = np.inf
        return collect(self, ticket)

    monkeypatch.setattr(ModelRunner, "collect", collect_not_finite)
    async with AsyncLLM(folder, device="cpu", dtype="float32", cpu_threads=1) as llm:
        broken.set()
        with pytest.raises(StepError, match="not finite"):
            await llm.embed([prompt_of(20), prompt_of(30)])
        broken.clear()
        check(await llm.embed(prompt_of(20)), folder, prompt_of(20), "last")


async def test_the_simulated_device_has_them_too() -> None:
    async with AsyncLLM(device="sim", prefill_chunk=16) as llm:
        prompt = [5 + i % 7 for i in range(52)]
        once = await llm.embed([prompt, prompt[::-1]], pooling="mean")
        assert once.shape == (2, llm.limits.embedding_size)
        np.testing.assert_array_equal(once[0], once[1])
        np.testing.assert_array_equal(await llm.embed(prompt, pooling="mean"), once[0])
        last = await llm.embed([prompt, prompt[::-1]])
        assert np.abs(last[0] - last[1]).max() > 0.5


async def test_the_example_finds_what_is_near() -> None:
    async with AsyncLLM(device="cpu", cpu_threads=1) as llm:
        [(first, sentence), *others] = await nearest(llm, "What is 3 + 4?")
        assert sentence == "What is 27 + 45?"
        assert 1 > first > max(cosine for cosine, _ in others) + 0.1


def test_plain_code(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    with LLM(folder, device="cpu", dtype="float32", cpu_threads=1, max_waiting=3) as llm:
        prompts = [prompt_of(length) for length in (5, 9, 13, 20, 30)]
        vectors = llm.embed(prompts, pooling="mean")
        for vector, prompt in zip(vectors, prompts, strict=True):
            check(vector, folder, prompt, "mean")
        check(llm.embed(prompts[0]), folder, prompts[0], "last")
        assert llm.embed(["a", "b"], EmbeddingParams(dimensions=5)).shape == (2, 5)
        assert llm.embed([]).shape == (0, 64)
        for bad in ([1000], []):
            with pytest.raises(BadRequest, match="prompt 1"):
                llm.embed([[5], bad])
