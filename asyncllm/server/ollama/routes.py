"""The routes of Ollama: those that generate and embed, and the table of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from aiohttp import web

from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import open_conversation
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.prompts import cut_to_fit, expect_prompts
from asyncllm.server.http.answer import encode, encode_with, json_body, json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.http.route import TAKES_JSON, Route
from asyncllm.server.model import Model
from asyncllm.server.ollama import models, requests, schemas
from asyncllm.server.ollama.reply import (
    LINES,
    OllamaReply,
    Piece,
    Write,
    chat_answer,
    generate_answer,
    ollama_error_response,
    timestamp,
)
from asyncllm.server.ollama.requests import NAMES, chat_of, ineffective, unloads
from asyncllm.server.openai.embeddings import answer_embeddings, embedding_jobs, embedding_params
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.server.service import SERVICE, Service


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    body = await request.app[SERVICE].receive(request, requests.OllamaChatRequest)
    return await _answer(request, body, began, chat_answer, empty=not body.messages)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    body = await request.app[SERVICE].receive(request, requests.OllamaGenerateRequest)
    return await _answer(request, body, began, generate_answer, empty=not body.prompt)


async def _answer(
    request: web.Request, body: requests.OllamaFields, began: int, write: Write, *, empty: bool
) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    model = models.resolve_model(service, body.model)
    plain = _is_plain(llm, body)
    left_out = list(ineffective(body.options, llm.limits.max_model_len))
    chat = await read_large(chat_of, body, model, llm.chat_reader.formats, left_out)
    service.note_ineffective(left_out)
    if empty:  # the request only loads or unloads the model, which stays as it is
        reason = "unload" if unloads(body) else "load"
        fields = {"created_at": timestamp(), "done": True, "done_reason": reason}
        return json_response(write(Piece(), model=model, **fields))
    scheduling = service.scheduling(request, chat)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    with renamed(NAMES, "completion" if plain else "chat"):
        params = sampling_params(chat, llm.default_params, logprobs=logprobs)
        if plain:
            assert isinstance(body, requests.OllamaGenerateRequest)
            text = body.prompt or ""
            expect_prompts(llm, request[RESERVATION], [text], 1)
            reader, prompt = MessageReader(None), await llm.encode(text)
            params = cut_to_fit(params, prompt, llm.limits.max_model_len)
        else:
            opened = await open_conversation(llm, chat, params, request[RESERVATION], cut=True)
            reader, prompt, params = opened.message_reader(), opened.prompt_ids, opened.params
        reply = OllamaReply(
            model,
            reader,
            write,
            prompt_tokens=len(prompt),
            began=began,
            tokenizer=llm.tokenizer if body.logprobs else None,
        )
        return await service.answer(request, [prompt], params, scheduling, reply, chat)


def _is_plain(llm: Model, body: requests.OllamaFields) -> bool:
    """Whether the prompt goes to the model without a chat template."""
    if not isinstance(body, requests.OllamaGenerateRequest):
        return False
    return bool(body.raw) or (llm.chat_template is None and not body.system)


async def ollama_embed(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    service = request.app[SERVICE]
    body = await service.receive(request, requests.OllamaEmbedRequest)
    model = _model_of(service, body)
    params = embedding_params(service, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) else body.input
    jobs = []
    if body.input and texts:
        prompts = _prompts(texts, truncate=body.truncate is not False)
        jobs = await embedding_jobs(service, request, prompts, params)
    submitted = time.perf_counter_ns()

    def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
        # Each vector is encoded by itself: encoding holds the GIL.
        vectors = (encode(params.vector(part).tolist()) for part in hidden)
        answer = schemas.OllamaEmbedded(
            model=model,
            embeddings=[],
            total_duration=time.perf_counter_ns() - began,
            load_duration=submitted - began,
            prompt_eval_count=sum(len(job.prompt_ids) for job in jobs),
        )
        return encode_with(answer, "embeddings", vectors)

    if not jobs:  # the request only loads the model
        return json_body(write((), 0))
    return await answer_embeddings(service, request, jobs, write)


async def ollama_embeddings(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, requests.OllamaEmbeddingsRequest)
    _model_of(service, body)
    params = embedding_params(service, None)
    if not body.prompt:
        return json_response(schemas.OllamaEmbedding(embedding=[]))
    jobs = await embedding_jobs(service, request, _prompts([body.prompt]), params)

    def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
        return encode(schemas.OllamaEmbedding(embedding=params.vector(hidden[0]).tolist()))

    return await answer_embeddings(service, request, jobs, write)


def _model_of(service: Service, body: requests.OllamaBody) -> str:
    """The model's name for the answer; tells the client of options without effect."""
    context = service.llm.limits.max_model_len
    service.note_ineffective(ineffective(body.options, context))
    return models.resolve_model(service, body.model)


def _prompts(texts: Sequence[str], *, truncate: bool = True) -> CompletionRequest:
    """``truncate``: whether to keep only the first tokens of a text that is too long."""
    prompts = CompletionRequest(prompt=list(texts), max_tokens=0)
    if truncate:
        prompts.truncate_prompt_tokens, prompts.truncation_side = -1, "right"
    return prompts


_route = partial(Route, error=schemas.OllamaError, write_error=ollama_error_response)
_get, _post = partial(_route, "GET"), partial(_route, "POST", refusals=(*TAKES_JSON, 500))

#: What their paths begin with, but for one.
ROOT: Final = "/api"

ROUTES: Final = (
    _post(
        "/api/chat",
        ollama_chat,
        "Answer a conversation, in Ollama's words",
        body=requests.OllamaChatRequest,
        answers=(schemas.OllamaChat,),
        event=schemas.OllamaChat,
        stream_type=LINES,
        refers=(requests.OllamaTool,),
    ),
    _post(
        "/api/generate",
        ollama_generate,
        "Answer a prompt, in Ollama's words",
        body=requests.OllamaGenerateRequest,
        answers=(schemas.OllamaGenerated,),
        event=schemas.OllamaGenerated,
        stream_type=LINES,
    ),
    _post(
        "/api/embed",
        ollama_embed,
        "Texts as vectors, in Ollama's words",
        body=requests.OllamaEmbedRequest,
        answers=(schemas.OllamaEmbedded,),
    ),
    _post(
        "/api/embeddings",
        ollama_embeddings,
        "One text as a vector, as Ollama's older clients ask for it",
        body=requests.OllamaEmbeddingsRequest,
        answers=(schemas.OllamaEmbedding,),
    ),
    _post(
        "/api/show",
        models.ollama_show,
        "What is known of a model",
        body=requests.OllamaShowRequest,
        answers=(schemas.OllamaShown,),
        refusals=TAKES_JSON,
    ),
    _get(
        "/api/tags",
        models.ollama_tags,
        "The models that are served, for Ollama's clients",
        answers=(schemas.OllamaTags,),
        refusals=(503,),
    ),
    _get(
        "/api/ps",
        models.ollama_processes,
        "The models that are loaded: all that are served",
        answers=(schemas.OllamaProcesses,),
        refusals=(503,),
    ),
    _get(
        "/",
        models.ollama_running,
        "Whether the server is alive; Ollama's clients ask here before anything else",
        refusals=(503,),
        needs_key=False,
    ),
    _get(
        "/api/version",
        models.ollama_version,
        "The version of Ollama whose API this is",
        answers=(schemas.OllamaVersion,),
    ),
)
