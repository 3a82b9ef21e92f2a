"""No single request keeps the event loop busy for long, whatever it asks for."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp.test_utils import TestClient, TestServer

from asyncllm import AsyncLLM
from asyncllm.server.app import create_app
from asyncllm.server_config import ServerConfig

#: Seconds of the loop's CPU time between two turns of another task; most requests take a tenth.
MOST = 0.15

IDS = [token % 200 for token in range(1_000_000)]
TEXT = "The quick brown fox jumps over the lazy dog 12345. " * 10_000  # half a million characters
USER: Any = {"role": "user", "content": "w"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

CASES: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "long prompt": (COMPLETIONS, {"prompt": IDS}, 400, "prompt"),
    "long prompt, scored": (
        COMPLETIONS,
        {"prompt": IDS, "echo": True, "logprobs": 1},
        400,
        "prompt",
    ),
    "many prompts": (COMPLETIONS, {"prompt": [IDS[:1000]] * 1000}, 400, "prompt"),
    "unknown field": (COMPLETIONS, {"prompt": IDS, "typo": 1}, 400, "prompt"),
    "long text": (COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 10}, 200, None),
    "cut prompt": (COMPLETIONS, {"prompt": IDS, "truncate_prompt_tokens": 10}, 200, None),
    "generate": ("/generate", {"prompt": IDS}, 400, "prompt"),
    "embeddings": ("/v1/embeddings", {"input": IDS}, 400, "input"),
    "stop": (CHAT, {"messages": [USER], "stop": "x" * 7_000_000}, 400, "stop"),
    "stops": (CHAT, {"messages": [USER], "stop": ["x" * 200_000] * 32}, 400, "stop"),
    "stop ids": (COMPLETIONS, {"prompt": "a", "stop_token_ids": IDS}, 400, "stop_token_ids"),
    "allowed ids": (
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": IDS},
        400,
        "allowed_token_ids",
    ),
    "many allowed ids": (
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": IDS[: 2**18]},
        200,
        None,
    ),
    "bad word": (COMPLETIONS, {"prompt": "a", "bad_words": [IDS]}, 400, "bad_words[0]"),
    "bad words": (
        COMPLETIONS,
        {"prompt": "a", "bad_words": [IDS[:4000]] * 250},
        400,
        "bad_words[0]",
    ),
    "long bad word": (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 10**6]}, 400, "bad_words"),
    "bias": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": dict.fromkeys(range(60_000), 1)},
        400,
        "logit_bias",
    ),
    "messages": (CHAT, {"messages": [USER] * 8192}, 400, "messages"),
    "items": ("/v1/responses", {"input": [USER] * 8192}, 400, "input"),
    "stop sequences": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 1, "stop_sequences": ["x" * 7_000_000]},
        400,
        None,
    ),
}


class Probe:
    """A task that takes turns with all others."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest = max(self.longest, now - before)
            before = now


@contextmanager
def watching() -> Iterator[Probe]:
    probe = Probe()
    task = asyncio.create_task(probe.watch())
    yield probe
    task.cancel()


@asynccontextmanager
async def asking() -> AsyncIterator[TestClient[Any, Any]]:
    async with (
        AsyncLLM(device="sim", max_model_len=512) as llm,
        TestClient(TestServer(create_app(llm, ServerConfig()))) as client,
    ):
        yield client


async def longest_block(
    client: TestClient[Any, Any], path: str, data: bytes
) -> tuple[float, int, Any]:
    """The least of several tries: what else the machine does is not the request's fault."""
    longest = []
    for _ in range(3):
        with watching() as probe:
            async with client.post(path, data=io.BytesIO(data)) as response:
                status, answer = response.status, await response.json()
        longest.append(probe.longest)
    return min(longest), status, answer


async def test_bodies_of_all_kinds() -> None:
    async with asking() as client:
        for name, (path, body, status, param) in CASES.items():
            data = msgspec.json.encode({"max_tokens": 1} | body)
            longest, found, answer = await longest_block(client, path, data)
            assert found == status, (name, answer)
            if param is not None:
                assert answer["error"]["param"] == param, name
            assert longest < MOST, f"{name}: {longest * 1e3:.0f} ms"


async def test_references_to_stored_items() -> None:
    async with asking() as client:
        # Of these turns, the context has room for a few.
        items = [{**USER, "id": f"msg_{i}"} for i in range(200)]
        stored = {"input": items, "truncation": "auto", "max_output_tokens": 1}
        async with client.post("/v1/responses", json=stored) as response:
            assert response.status == 200, await response.text()
        references = [{"type": "item_reference", "id": f"msg_{i % 200}"} for i in range(8000)]
        data = msgspec.json.encode({"input": references, "max_output_tokens": 1})
        longest, status, answer = await longest_block(client, "/v1/responses", data)
        assert status == 400, answer
        assert answer["error"]["code"] == "context_length_exceeded"
        assert longest < MOST
