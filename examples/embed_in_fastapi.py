"""Serve a model inside a FastAPI application, and use it from a route of its own.

pip install fastapi uvicorn
python examples/embed_in_fastapi.py [MODEL] [--port 8080]
curl localhost:8080/reverse/hello
curl localhost:8080/llm/v1/models
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from asyncllm import AsyncLLM


def create_app(model: str | None = None) -> FastAPI:
    llm = AsyncLLM(model)

    @asynccontextmanager
    async def engine(app: FastAPI) -> AsyncIterator[None]:
        """Start the model with the application, and close it with it."""
        async with llm:
            yield

    app = FastAPI(lifespan=engine)

    @app.get("/reverse/{word}", response_class=PlainTextResponse)
    async def reverse(word: str) -> str:
        messages = [{"role": "user", "content": f"Reverse the word {word}."}]
        answer = await llm.generate(messages)
        return answer.text + "\n"

    app.mount("/llm", llm.asgi_app())
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or hub id; the demo by default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    uvicorn.run(create_app(options.model), host=options.host, port=options.port)
