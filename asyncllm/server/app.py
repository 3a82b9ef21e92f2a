"""The HTTP API as an aiohttp application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from asyncllm.server.anthropic import routes as anthropic_routes
from asyncllm.server.anthropic.errors import anthropic_error_response
from asyncllm.server.http.access_log import log_requests
from asyncllm.server.http.cors import add_cors, answer_preflights
from asyncllm.server.http.middleware import (
    ERROR_ROOTS,
    ERROR_WRITERS,
    KNOWN_ROUTE,
    answer_errors,
    clean_up,
    require_key,
    set_headers,
)
from asyncllm.server.http.waits import ACCEPT_WAITS, Waits
from asyncllm.server.native import admin
from asyncllm.server.native.generate import generate
from asyncllm.server.native.metrics import add_metrics, metrics
from asyncllm.server.native.openapi import GENERATES, PATH, TAKES_JSON, Description, Route
from asyncllm.server.native.tokenize import detokenize, tokenize
from asyncllm.server.ollama import routes as ollama_routes
from asyncllm.server.ollama.errors import ollama_error_response
from asyncllm.server.openai import schemas as answers
from asyncllm.server.openai.chat import chat_completions
from asyncllm.server.openai.completions import completions
from asyncllm.server.openai.embeddings import embeddings
from asyncllm.server.openai.embeddings_protocol import EmbeddingList, EmbeddingRequest
from asyncllm.server.openai.render import render_chat
from asyncllm.server.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from asyncllm.server.responses import routes as responses_routes
from asyncllm.server.responses.handlers import add_responses
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.streaming.cuts import CUTS, Cuts

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

    from asyncllm.config import ServerConfig
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.server.http.errors import ErrorWriter

ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation",
        body=ChatRequest,
        answers=(answers.ChatCompletion,),
        event=answers.ChatCompletionChunk,
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue texts",
        body=CompletionRequest,
        answers=(answers.Completion,),
        event=answers.CompletionChunk,
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        summary="Texts as vectors",
        body=EmbeddingRequest,
        answers=(EmbeddingList,),
        refusals=GENERATES,
    ),
    *responses_routes.ROUTES,
    *anthropic_routes.ROUTES,
    *ollama_routes.ROUTES,
    Route(
        method="POST",
        path="/v1/chat/completions/render",
        handler=render_chat,
        summary="What a conversation would be for the model",
        body=ChatRequest,
        answers=(answers.Rendered,),
        refusals=(*TAKES_JSON, 429),
    ),
    Route(
        method="POST",
        path="/generate",
        handler=generate,
        summary="Continue one text, with nothing around the answer",
        body=GenerateRequest,
        answers=(answers.Generated,),
        event=answers.Generated,
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="Token ids of a text or of a conversation",
        body=TokenizeRequest,
        answers=(answers.Tokenized,),
        refusals=TAKES_JSON,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="The text of token ids",
        body=DetokenizeRequest,
        answers=(answers.Detokenized,),
        refusals=TAKES_JSON,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=admin.list_models,
        summary="The models that are served",
        answers=(answers.ModelList,),
        refusals=(503,),
    ),
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=admin.retrieve_model,
        summary="One model that is served",
        answers=(answers.Model,),
        refusals=(404, 503),
    ),
    Route(
        method="GET",
        path="/v1/requests/{id:.+}/trace",
        handler=admin.request_trace,
        summary="What happened to a request, by its X-Request-Id or the id of its answer",
        answers=(answers.NamedTrace, answers.Timeline),
        query={"format": ("json", "perfetto")},
        refusals=(400, 404, 503),
    ),
    Route(
        method="POST",
        path="/v1/requests/{id:.+}/abort",
        handler=admin.abort_request,
        summary="End a request that is being served, by its X-Request-Id or the id of its answer",
        answers=(answers.Aborted,),
        refusals=(404,),
    ),
    Route(
        method="GET",
        path="/health",
        handler=admin.health,
        summary="Whether the server is alive",
        answers=(answers.Status,),
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ping",
        handler=admin.ping,
        summary="The same, by the name that some platforms ask for",
        answers=(answers.Status,),
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=admin.ready,
        summary="Whether requests are taken now",
        answers=(answers.Status,),
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/load",
        handler=admin.load,
        summary="How many requests are being served",
        answers=(answers.Load,),
    ),
    Route(method="GET", path="/metrics", handler=metrics, summary="Metrics for Prometheus"),
    Route(
        method="GET",
        path="/version",
        handler=admin.version,
        summary="The version of the server",
        answers=(answers.Version,),
    ),
)


def create_app(llm: AsyncLLM, config: ServerConfig) -> web.Application:
    """All routes, for ``serve`` or for ``add_subapp`` of a host application.

    The engine's life stays with the caller: until it is ready, requests get 503.

    Raises:
        OSError, BadRequest: the file of API keys cannot be read, or is empty.
    """
    service = Service(llm, config)
    middlewares: list[Middleware] = [answer_errors, clean_up]
    if config.log_requests:
        middlewares.insert(0, log_requests(service))
    if config.cors_origin:
        middlewares.append(answer_preflights)
    if service.keys:
        unguarded = [route.handler for route in ROUTES if not route.needs_key]
        middlewares.append(require_key(service.keys, exempt=unguarded))
    app = web.Application(middlewares=middlewares)
    app[SERVICE] = service
    app[ACCEPT_WAITS] = Waits()
    app[CUTS] = Cuts()
    app.on_response_prepare.append(set_headers)
    if config.cors_origin:
        add_cors(app, config.cors_origin)
    add_metrics(app)
    add_responses(app)
    anthropic_routes.add_header(app)
    app[ERROR_WRITERS] = {route.handler: route.write_error for route in ROUTES}
    roots: dict[str, ErrorWriter] = {
        anthropic_routes.ROOT: anthropic_error_response,
        ollama_routes.ROOT: ollama_error_response,
    }
    app[ERROR_ROOTS] = roots
    add = {
        "GET": app.router.add_get,  # with it comes HEAD
        "POST": app.router.add_post,
        "DELETE": app.router.add_delete,
    }
    for route in ROUTES:
        add[route.method](route.path, route.handler)
    description = Description(ROUTES, config, needs_key=bool(service.keys))
    app[KNOWN_ROUTE] = app.router.add_get(PATH, description.serve), PATH
    return app
