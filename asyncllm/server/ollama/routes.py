"""The routes of Ollama."""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncllm.server.http.route import TAKES_JSON, Route
from asyncllm.server.ollama import embed as ollama_embed
from asyncllm.server.ollama import handlers as ollama
from asyncllm.server.ollama import models as ollama_models
from asyncllm.server.ollama import schemas as ollama_answers
from asyncllm.server.ollama.errors import ollama_error_response
from asyncllm.server.ollama.reply import LINES
from asyncllm.server.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    OllamaTool,
)

_route = partial(Route, error=ollama_answers.OllamaError, write_error=ollama_error_response)

#: What their paths begin with, but for one.
ROOT: Final = "/api"

ROUTES: Final = (
    _route(
        method="POST",
        path="/api/chat",
        handler=ollama.ollama_chat,
        summary="Answer a conversation, in Ollama's words",
        body=OllamaChatRequest,
        answers=(ollama_answers.OllamaChat,),
        event=ollama_answers.OllamaChat,
        stream_type=LINES,
        refusals=(*TAKES_JSON, 500),
        refers=(OllamaTool,),
    ),
    _route(
        method="POST",
        path="/api/generate",
        handler=ollama.ollama_generate,
        summary="Answer a prompt, in Ollama's words",
        body=OllamaGenerateRequest,
        answers=(ollama_answers.OllamaGenerated,),
        event=ollama_answers.OllamaGenerated,
        stream_type=LINES,
        refusals=(*TAKES_JSON, 500),
    ),
    _route(
        method="POST",
        path="/api/embed",
        handler=ollama_embed.ollama_embed,
        summary="Texts as vectors, in Ollama's words",
        body=OllamaEmbedRequest,
        answers=(ollama_answers.OllamaEmbedded,),
        refusals=(*TAKES_JSON, 500),
    ),
    _route(
        method="POST",
        path="/api/embeddings",
        handler=ollama_embed.ollama_embeddings,
        summary="One text as a vector, as Ollama's older clients ask for it",
        body=OllamaEmbeddingsRequest,
        answers=(ollama_answers.OllamaEmbedding,),
        refusals=(*TAKES_JSON, 500),
    ),
    _route(
        method="POST",
        path="/api/show",
        handler=ollama_models.ollama_show,
        summary="What is known of a model",
        body=OllamaShowRequest,
        answers=(ollama_answers.OllamaShown,),
        refusals=TAKES_JSON,
    ),
    _route(
        method="GET",
        path="/api/tags",
        handler=ollama_models.ollama_tags,
        summary="The models that are served, for Ollama's clients",
        answers=(ollama_answers.OllamaTags,),
        refusals=(503,),
    ),
    _route(
        method="GET",
        path="/api/ps",
        handler=ollama_models.ollama_processes,
        summary="The models that are loaded: all that are served",
        answers=(ollama_answers.OllamaProcesses,),
        refusals=(503,),
    ),
    _route(
        method="GET",
        path="/",
        handler=ollama_models.ollama_running,
        summary="Whether the server is alive; Ollama's clients ask here before anything else",
        refusals=(503,),
        needs_key=False,
    ),
    _route(
        method="GET",
        path="/api/version",
        handler=ollama_models.ollama_version,
        summary="The version of Ollama whose API this is",
        answers=(ollama_answers.OllamaVersion,),
    ),
)
