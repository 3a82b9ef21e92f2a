"""The HTTP API as an aiohttp application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from asyncllm.server import admin
from asyncllm.server.chat import chat_completions
from asyncllm.server.completions import completions
from asyncllm.server.generate import generate
from asyncllm.server.metrics import add_metrics, metrics
from asyncllm.server.middleware import answer_errors, require_key, set_request_id
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from asyncllm.api import AsyncLLM
    from asyncllm.config import ServerConfig


def create_app(llm: AsyncLLM, config: ServerConfig) -> web.Application:
    """All routes, for ``serve`` or for ``add_subapp`` of a host application.

    The engine's life stays with the caller: until it is ready, requests get 503.
    """
    middlewares: list[Middleware] = [answer_errors]
    service = Service(llm, config)
    if config.api_key:
        middlewares.append(require_key(service.keys, exempt=(admin.health, admin.ready)))
    app = web.Application(middlewares=middlewares)
    app[SERVICE] = service
    app.on_response_prepare.append(set_request_id)
    add_metrics(app)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/models", admin.list_models),
            web.get("/v1/models/{id:.+}", admin.retrieve_model),
            web.get("/v1/requests/{id:.+}/trace", admin.request_trace),
            web.post("/generate", generate),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", admin.health),
            web.get("/ready", admin.ready),
            web.get("/metrics", metrics),
            web.get("/version", admin.version),
        ]
    )
    return app
