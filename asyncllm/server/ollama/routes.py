"""The routes of Ollama."""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncllm.server.http.route import TAKES_JSON, Route
from asyncllm.server.ollama import embed, handlers, models, requests, schemas
from asyncllm.server.ollama.errors import ollama_error_response
from asyncllm.server.ollama.reply import LINES

_get = partial(Route, method="GET", error=schemas.OllamaError, write_error=ollama_error_response)
_post = partial(_get, method="POST", refusals=(*TAKES_JSON, 500))

#: What their paths begin with, but for one.
ROOT: Final = "/api"

ROUTES: Final = (
    _post(
        path="/api/chat",
        handler=handlers.ollama_chat,
        summary="Answer a conversation, in Ollama's words",
        body=requests.OllamaChatRequest,
        answers=(schemas.OllamaChat,),
        event=schemas.OllamaChat,
        stream_type=LINES,
        refers=(requests.OllamaTool,),
    ),
    _post(
        path="/api/generate",
        handler=handlers.ollama_generate,
        summary="Answer a prompt, in Ollama's words",
        body=requests.OllamaGenerateRequest,
        answers=(schemas.OllamaGenerated,),
        event=schemas.OllamaGenerated,
        stream_type=LINES,
    ),
    _post(
        path="/api/embed",
        handler=embed.ollama_embed,
        summary="Texts as vectors, in Ollama's words",
        body=requests.OllamaEmbedRequest,
        answers=(schemas.OllamaEmbedded,),
    ),
    _post(
        path="/api/embeddings",
        handler=embed.ollama_embeddings,
        summary="One text as a vector, as Ollama's older clients ask for it",
        body=requests.OllamaEmbeddingsRequest,
        answers=(schemas.OllamaEmbedding,),
    ),
    _post(
        path="/api/show",
        handler=models.ollama_show,
        summary="What is known of a model",
        body=requests.OllamaShowRequest,
        answers=(schemas.OllamaShown,),
        refusals=TAKES_JSON,
    ),
    _get(
        path="/api/tags",
        handler=models.ollama_tags,
        summary="The models that are served, for Ollama's clients",
        answers=(schemas.OllamaTags,),
        refusals=(503,),
    ),
    _get(
        path="/api/ps",
        handler=models.ollama_processes,
        summary="The models that are loaded: all that are served",
        answers=(schemas.OllamaProcesses,),
        refusals=(503,),
    ),
    _get(
        path="/",
        handler=models.ollama_running,
        summary="Whether the server is alive; Ollama's clients ask here before anything else",
        refusals=(503,),
        needs_key=False,
    ),
    _get(
        path="/api/version",
        handler=models.ollama_version,
        summary="The version of Ollama whose API this is",
        answers=(schemas.OllamaVersion,),
    ),
)
