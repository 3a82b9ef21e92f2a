"""Serve a model inside an existing aiohttp application, and use it from a handler of its own.

python examples/embed_in_aiohttp.py [MODEL] [--port 8080]
curl localhost:8080/reverse/hello
curl localhost:8080/llm/v1/models
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

from aiohttp import web

from asyncllm import AsyncLLM

LLM_KEY = web.AppKey("llm", AsyncLLM)


async def engine(app: web.Application) -> AsyncIterator[None]:
    """Start the model with the application, and close it with it."""
    async with app[LLM_KEY]:
        yield


async def reverse(request: web.Request) -> web.Response:
    word = request.match_info["word"]
    messages = [{"role": "user", "content": f"Reverse the word {word}."}]
    answer = await request.app[LLM_KEY].generate(messages)
    return web.Response(text=answer.text + "\n")


def create_app(model: str | None = None) -> web.Application:
    app = web.Application()
    llm = app[LLM_KEY] = AsyncLLM(model)
    app.cleanup_ctx.append(engine)
    app.router.add_get("/reverse/{word}", reverse)
    app.add_subapp("/llm", llm.aiohttp_app())
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or hub id; the demo by default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    web.run_app(create_app(options.model), host=options.host, port=options.port)
