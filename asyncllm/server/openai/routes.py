"""The routes of OpenAI's chat, completions and embeddings."""

from __future__ import annotations

from typing import Final

from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route
from asyncllm.server.openai import schemas
from asyncllm.server.openai.chat import chat_completions, render_chat
from asyncllm.server.openai.completions import completions
from asyncllm.server.openai.embeddings import embeddings
from asyncllm.server.openai.requests import CompletionRequest, EmbeddingRequest

ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        summary="Answer a conversation",
        body=ChatRequest,
        answers=(schemas.ChatCompletion,),
        event=schemas.ChatCompletionChunk,
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        summary="Continue texts",
        body=CompletionRequest,
        answers=(schemas.Completion,),
        event=schemas.CompletionChunk,
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        summary="Texts as vectors",
        body=EmbeddingRequest,
        answers=(schemas.EmbeddingList,),
        refusals=GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/chat/completions/render",
        handler=render_chat,
        summary="What a conversation would be for the model",
        body=ChatRequest,
        answers=(schemas.Rendered,),
        refusals=(*TAKES_JSON, 429),
    ),
)
