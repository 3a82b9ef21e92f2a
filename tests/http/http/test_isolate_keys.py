"""``--isolate-keys``: whether prefixes that one API key has sent are cached for another."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncllm import AsyncLLM, SamplingParams, SchedulingParams
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.server.app import create_app

PROMPT = list(range(100, 164))
TEXT = " ".join(["planet"] * 60)
USER: Any = [{"role": "user", "content": TEXT}]


@asynccontextmanager
async def asking(**config: Any) -> AsyncIterator[TestClient[Any, Any]]:
    """The simulated device: scheduler and prefix cache are the real ones."""
    async with AsyncLLM(device="sim", max_model_len=512) as llm:
        app = create_app(llm, ServerConfig(api_key=("a", "b"), **config))
        async with TestClient(TestServer(app)) as client:
            yield client


async def cached_tokens(
    client: TestClient[Any, Any], key: str, path: str, body: dict[str, Any]
) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/generate": {"prompt": PROMPT, "max_tokens": 1},
}


@pytest.mark.parametrize("isolated", [False, True])
async def test_keys_share_prefixes_unless_isolated(isolated: bool) -> None:
    async with asking(isolate_keys=isolated) as client:
        for number, (path, body) in enumerate(ROUTES.items()):
            salted = body | {"cache_salt": f"route {number}"}
            assert await cached_tokens(client, "a", path, salted) == 0
            assert await cached_tokens(client, "a", path, salted) >= 48
            assert (await cached_tokens(client, "b", path, salted) > 0) is not isolated, path
            assert await cached_tokens(client, "b", path, salted) >= 48


async def test_beams_and_salts_stay_with_their_key() -> None:
    async with asking(isolate_keys=True) as client:
        beams = {"prompt": PROMPT, "max_tokens": 2, "use_beam_search": True, "n": 2}
        beams["temperature"] = 0
        assert await cached_tokens(client, "a", "/v1/completions", beams) == 0
        assert await cached_tokens(client, "b", "/v1/completions", beams) == 0
        body = ROUTES["/v1/completions"]
        assert await cached_tokens(client, "a", "/v1/completions", body) >= 48
        salted = body | {"cache_salt": "mine"}
        assert await cached_tokens(client, "a", "/v1/completions", salted) == 0


def test_no_two_tenants_have_the_same_salt() -> None:
    parts = ["", "a", "aa", "b", "key-1", "\xff", "\ud800", "1:a", '"a","']
    given = [
        SchedulingParams(tenant=tenant, cache_salt=salt, isolated=isolated)
        for isolated, tenant, salt in itertools.product((False, True), parts, parts)
    ]
    isolated = [params.salt for params in given if params.isolated]
    shared = {params.salt for params in given if not params.isolated}
    assert len(set(isolated)) == len(parts) ** 2
    assert len(shared) == len(parts)
    assert shared.isdisjoint(isolated)


async def test_the_library_isolates_a_request_by_its_params() -> None:
    async with AsyncLLM(device="sim", max_model_len=512) as llm:
        found = []
        for tenant, isolated in (("a", False), ("b", False), ("b", True), ("a", True), ("b", True)):
            scheduling = SchedulingParams(tenant=tenant, isolated=isolated)
            answer = await llm.generate(PROMPT, SamplingParams(max_tokens=1), scheduling)
            found.append(answer.usage.cached_tokens > 0)
    assert found == [False, True, False, False, True]


def test_isolation_needs_keys() -> None:
    with pytest.raises(BadRequest, match="isolate_keys needs api_key"):
        ServerConfig(isolate_keys=True)
