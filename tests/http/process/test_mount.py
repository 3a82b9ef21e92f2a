"""Inside a host application: its middlewares, its limits, and several models side by side."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.app import create_app
from tests.support.server.fake_llm import FakeLLM

if TYPE_CHECKING:
    from aiohttp.test_utils import TestClient
    from aiohttp.typedefs import Handler
    from pytest_aiohttp import AiohttpClient


def host(**prefixes: FakeLLM) -> web.Application:
    @web.middleware
    async def refuse_strangers(request: web.Request, handler: Handler) -> web.StreamResponse:
        if "X-Stranger" in request.headers:
            return web.Response(status=403, text="go away")
        return await handler(request)

    async def home(request: web.Request) -> web.Response:
        return web.Response(text="home")

    app = web.Application(middlewares=[refuse_strangers])
    app.router.add_get("/", home)
    for prefix, llm in prefixes.items():
        config = ServerConfig(served_model_name=(prefix,))
        app.add_subapp(f"/{prefix}", create_app(llm, config))
    return app


async def test_two_models_in_one_host(aiohttp_client: AiohttpClient) -> None:
    llms = {"one": FakeLLM(), "two": FakeLLM()}
    for llm in llms.values():
        await llm.start()
    client = await aiohttp_client(host(**llms))
    async with asyncio.TaskGroup() as group:
        for name in llms:
            group.create_task(ask(client, name))
    assert await (await client.get("/")).text() == "home"
    # The host answers outside our prefixes as it likes, and within them before us.
    outside = await client.get("/nothing")
    assert outside.content_type == "text/plain"
    assert "X-Request-Id" not in outside.headers
    refused = await client.get("/one/version", headers={"X-Stranger": "1"})
    assert (refused.status, await refused.text()) == (403, "go away")
    metrics = await (await client.get("/two/metrics")).text()
    assert "asyncllm_generation_tokens_total 4.0" in metrics
    for llm in llms.values():
        await llm.aclose()


async def ask(client: TestClient[web.Request, web.Application], name: str) -> None:
    assert (await (await client.get(f"/{name}/v1/models")).json())["data"][0]["id"] == name
    answer = await client.post(f"/{name}/v1/completions", json={"prompt": "abc"})
    body = await answer.json()
    assert (body["model"], body["choices"][0]["text"]) == (name, "abc")
