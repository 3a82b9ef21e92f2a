"""The server's own routes."""

from __future__ import annotations

from typing import Final

from asyncllm.server.arrivals.names import home_of_number
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route
from asyncllm.server.metrics.scrape import metrics
from asyncllm.server.native import admin, health
from asyncllm.server.native import schemas as answers
from asyncllm.server.native.generate import generate
from asyncllm.server.native.live import live, live_abort, live_trace
from asyncllm.server.native.live_answers import LiveState
from asyncllm.server.native.requests import DetokenizeRequest, GenerateRequest, TokenizeRequest
from asyncllm.server.native.tokenize import detokenize, tokenize

ROUTES: Final = (
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
        came=admin.came,
        handler=admin.request_trace,
        summary="What happened to a request, by its X-Request-Id or the id of its answer",
        answers=(answers.NamedTrace,),
        refusals=(404, 503),
    ),
    Route(
        method="POST",
        path="/v1/requests/{id:.+}/abort",
        came=admin.came,
        handler=admin.abort_request,
        summary="End a request that is being served, by its X-Request-Id or the id of its answer",
        answers=(answers.Aborted,),
        refusals=(404,),
    ),
    Route(
        method="GET",
        path="/health",
        asks="health",
        handler=health.health,
        summary="Whether the server is alive, and how long ago it made progress",
        answers=(answers.Health,),
        error=answers.Health,
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ping",
        asks="health",
        handler=health.ping,
        summary="Whether the server is alive, by the name that some platforms ask for",
        answers=(answers.Health,),
        error=answers.Health,
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ready",
        asks="ready",
        handler=health.ready,
        summary="Whether requests are taken now",
        answers=(answers.Status,),
        refusals=(503,),
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/load",
        asks="load",
        handler=admin.load,
        summary="How many requests are being served",
        answers=(answers.Load,),
    ),
    Route(
        method="GET",
        path="/metrics",
        asks="metrics",
        handler=metrics,
        summary="Metrics for Prometheus",
    ),
    Route(
        method="GET",
        path="/version",
        handler=admin.version,
        summary="The version of the server",
        answers=(answers.Version,),
    ),
)

#: What the page for browsers asks for.
PAGE_ROUTES: Final = (
    Route(
        method="GET",
        path="/live",
        asks="live",
        handler=live,
        summary="What runs, what waits and why, and the latest steps",
        answers=(LiveState,),
        refusals=(503,),
    ),
    Route(
        method="GET",
        path="/live/{id:.+}/trace",
        home=home_of_number,
        handler=live_trace,
        summary="What happened to a request, by its number in /live",
        answers=(answers.NamedTrace,),
        refusals=(404, 503),
    ),
    Route(
        method="POST",
        path="/live/{id:.+}/abort",
        home=home_of_number,
        handler=live_abort,
        summary="End a request that is being served, by its number in /live",
        answers=(answers.Aborted,),
        refusals=(404,),
    ),
)
