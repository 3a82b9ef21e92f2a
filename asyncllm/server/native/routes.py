"""The server's own routes."""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncllm.server.arrivals.names import home_of_number
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route
from asyncllm.server.metrics.server import metrics
from asyncllm.server.native import admin, health
from asyncllm.server.native import schemas as answers
from asyncllm.server.native.generate import generate
from asyncllm.server.native.live import live, live_abort, live_trace
from asyncllm.server.native.live_answers import LiveState
from asyncllm.server.native.requests import DetokenizeRequest, GenerateRequest, TokenizeRequest
from asyncllm.server.native.tokenize import detokenize, tokenize

_get, _post = partial(Route, "GET"), partial(Route, "POST")
_health = partial(
    _get,
    asks="health",
    answers=(answers.Health,),
    error=answers.Health,
    refusals=(503,),
    needs_key=False,
)
_trace = partial(_get, answers=(answers.NamedTrace,), refusals=(404, 503))
_abort = partial(_post, answers=(answers.Aborted,), refusals=(404,))

ROUTES: Final = (
    _post(
        "/generate",
        generate,
        "Continue one text, with nothing around the answer",
        body=GenerateRequest,
        answers=(answers.Generated,),
        event=answers.Generated,
        refusals=GENERATES,
    ),
    _post(
        "/tokenize",
        tokenize,
        "Token ids of a text or of a conversation",
        body=TokenizeRequest,
        answers=(answers.Tokenized,),
        refusals=TAKES_JSON,
    ),
    _post(
        "/detokenize",
        detokenize,
        "The text of token ids",
        body=DetokenizeRequest,
        answers=(answers.Detokenized,),
        refusals=TAKES_JSON,
    ),
    _get(
        "/v1/models",
        admin.list_models,
        "The models that are served",
        answers=(answers.ModelList,),
        refusals=(503,),
    ),
    _get(
        "/v1/models/{id:.+}",
        admin.retrieve_model,
        "One model that is served",
        answers=(answers.Model,),
        refusals=(404, 503),
    ),
    _trace(
        "/v1/requests/{id:.+}/trace",
        admin.request_trace,
        "What happened to a request, by its X-Request-Id or the id of its answer",
        came=admin.came,
    ),
    _abort(
        "/v1/requests/{id:.+}/abort",
        admin.abort_request,
        "End a request that is being served, by its X-Request-Id or the id of its answer",
        came=admin.came,
    ),
    _health(
        "/health", health.health, "Whether the server is alive, and how long ago it made progress"
    ),
    _health(
        "/ping", health.ping, "Whether the server is alive, by the name that some platforms ask for"
    ),
    _get(
        "/ready",
        health.ready,
        "Whether requests are taken now",
        asks="ready",
        answers=(answers.Status,),
        refusals=(503,),
        needs_key=False,
    ),
    _get(
        "/load",
        admin.load,
        "How many requests are being served",
        asks="load",
        answers=(answers.Load,),
    ),
    _get("/metrics", metrics, "Metrics for Prometheus", asks="metrics"),
    _get("/version", admin.version, "The version of the server", answers=(answers.Version,)),
)

#: What the page for browsers asks for.
PAGE_ROUTES: Final = (
    _get(
        "/live",
        live,
        "What runs, what waits and why, and the latest steps",
        asks="live",
        answers=(LiveState,),
        refusals=(503,),
    ),
    _trace(
        "/live/{id:.+}/trace",
        live_trace,
        "What happened to a request, by its number in /live",
        home=home_of_number,
    ),
    _abort(
        "/live/{id:.+}/abort",
        live_abort,
        "End a request that is being served, by its number in /live",
        home=home_of_number,
    ),
)
