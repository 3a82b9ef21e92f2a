"""The routes of OpenAI's chat, completions and embeddings."""

from __future__ import annotations

from functools import partial
from typing import Final

from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route
from asyncllm.server.openai import schemas
from asyncllm.server.openai.chat import chat_completions, render_chat
from asyncllm.server.openai.completions import completions
from asyncllm.server.openai.embeddings import embeddings
from asyncllm.server.openai.requests import CompletionRequest, EmbeddingRequest

_post = partial(Route, "POST")

ROUTES: Final = (
    _post(
        "/v1/chat/completions",
        chat_completions,
        "Answer a conversation",
        body=ChatRequest,
        answers=(schemas.ChatCompletion,),
        event=schemas.ChatCompletionChunk,
        refusals=GENERATES,
    ),
    _post(
        "/v1/completions",
        completions,
        "Continue texts",
        body=CompletionRequest,
        answers=(schemas.Completion,),
        event=schemas.CompletionChunk,
        refusals=GENERATES,
    ),
    _post(
        "/v1/embeddings",
        embeddings,
        "Texts as vectors",
        body=EmbeddingRequest,
        answers=(schemas.EmbeddingList,),
        refusals=GENERATES,
    ),
    _post(
        "/v1/chat/completions/render",
        render_chat,
        "What a conversation would be for the model",
        body=ChatRequest,
        answers=(schemas.Rendered,),
        refusals=(*TAKES_JSON, 429),
    ),
)
