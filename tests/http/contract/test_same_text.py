"""A greedy answer is the same, however it is asked for and whatever else runs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm import AsyncLLM
from tests.cpu.llm.test_parity import expect_short_outputs
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

#: From 3 to 171 tokens; some share their beginnings.
PROMPTS = [
    [5 + i % 3] * 2 + [(7 * i + j * j) % 900 + 20 for j in range(1 + 24 * i)] for i in range(8)
]
LENGTH = 40

#: Options under which nothing may change.
VARIANTS: dict[str, dict[str, Any]] = {
    "small chunks": {"prefill_chunk": 16, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "preempted": {"kv_cache_tokens": 256, "max_model_len": 256, "page_size": 4},
    "no cache, one step in flight": {"prefix_caching": False, "steps_in_flight": 1},
}


def ask(server: Server, prompt: list[int], *, stream: bool = False) -> str:
    # With a stop string, nobody knows how long an answer becomes, and too many are admitted.
    body = {"prompt": prompt, "temperature": 0, "max_tokens": LENGTH, "stop": "never there"}
    answer = server.post("/v1/completions", {**body, "ignore_eos": True, "stream": stream})
    assert answer.status == 200, answer.body
    frames = answer.frames if stream else [answer.json]
    return "".join(frame["choices"][0]["text"] for frame in frames)


@pytest.fixture(scope="module")
def alone() -> Iterator[list[str]]:
    """Each asked by itself, with the default options; asked again, the prompts are cached."""
    with serving(lambda: AsyncLLM(device="cpu", cpu_threads=1)) as server:
        answers = [ask(server, prompt) for prompt in PROMPTS]
        assert [ask(server, prompt, stream=True) for prompt in PROMPTS] == answers
        assert cached_tokens(server) > 0
        yield answers


def cached_tokens(server: Server) -> float:
    return counter(server, "cached_prompt_tokens_total")


def counter(server: Server, name: str) -> float:
    found = re.search(rf"^asyncllm_{name} (\S+)$", server.get("/metrics").body.decode(), re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_text_does_not_change(alone: list[str], name: str) -> None:
    options = VARIANTS[name]
    with (
        serving(lambda: AsyncLLM(device="cpu", cpu_threads=1, **options)) as server,
        ThreadPoolExecutor(2 * len(PROMPTS)) as threads,
    ):
        if name == "preempted":
            llm: Any = server.llm
            server.call(lambda: expect_short_outputs(llm))
        asked = [
            threads.submit(ask, server, prompt, stream=stream)
            for stream in (False, True)
            for prompt in PROMPTS
        ]
        assert [one.result(60) for one in asked] == alone * 2
        if name == "preempted":
            assert counter(server, "preemptions_total") > 0
        if not options.get("prefix_caching", True):
            assert cached_tokens(server) == 0
