"""POST /api/chat and /api/generate, as Ollama's clients use them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncllm.server.chat.adapter import cut_to_fit, open_chat, renamed
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.chat.scheduling import expect_prompts
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.ollama import requests
from asyncllm.server.ollama.conversion import NAMES, chat_of, ineffective, unloads
from asyncllm.server.ollama.models import resolve_model
from asyncllm.server.ollama.reply import (
    OllamaReply,
    Piece,
    chat_answer,
    generate_answer,
    timestamp,
)
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.delivery import Job

if TYPE_CHECKING:
    from aiohttp import web

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.server.ollama.reply import Write
    from asyncllm.types import SchedulingParams


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    body = await request.app[SERVICE].receive(request, requests.OllamaChatRequest)
    return await _answer(request, body, began, chat_answer, empty=not body.messages)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    body = await request.app[SERVICE].receive(request, requests.OllamaGenerateRequest)
    return await _answer(request, body, began, generate_answer, empty=not body.prompt)


async def _answer(
    request: web.Request,
    body: requests.OllamaFields,
    began: int,
    write: Write,
    *,
    empty: bool,
) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    model = resolve_model(service, body.model)
    left_out = list(ineffective(body.options, llm.limits.max_model_len))
    chat = await read_large(chat_of, body, model, llm.chat_reader.formats, left_out)
    service.note_ineffective(left_out)
    if empty:  # the request only loads or unloads the model, which stays as it is
        reason = "unload" if unloads(body) else "load"
        fields = {"created_at": timestamp(), "done": True, "done_reason": reason}
        return json_response(write(Piece(), model=model, **fields))
    scheduling = service.scheduling(request, chat)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    with renamed(NAMES, "completion" if _is_plain(llm, body) else "chat"):
        reader, job = await _open(llm, body, chat, scheduling, request[RESERVATION], logprobs)
        reply = OllamaReply(
            model,
            reader,
            write,
            prompt_tokens=len(job.prompt_ids),
            began=began,
            tokenizer=llm.tokenizer if body.logprobs else None,
        )
        job = cut_to_fit(job, llm.limits.max_model_len)
        return await service.answer(request, [job], reply, chat)


async def _open(
    llm: Model,
    body: requests.OllamaFields,
    chat: ChatRequest,
    scheduling: SchedulingParams,
    reservation: Reservation,
    logprobs: int | None,
) -> tuple[MessageReader, Job]:
    """
    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    if not _is_plain(llm, body):
        opened = await open_chat(llm, chat, scheduling, reservation, logprobs=logprobs)
        return opened.conversation.message_reader(), opened.job
    assert isinstance(body, requests.OllamaGenerateRequest)
    text = body.prompt or ""
    params = sampling_params(
        chat, llm.default_params, max_tokens=chat.max_tokens, logprobs=logprobs
    )
    expect_prompts(llm, reservation, [text], 1)
    [job] = await fan_out(llm, [await llm.encode(text)], 1, params, scheduling, chat)
    return MessageReader(None), job


def _is_plain(llm: Model, body: requests.OllamaFields) -> bool:
    """Whether the prompt goes to the model without a chat template."""
    if not isinstance(body, requests.OllamaGenerateRequest):
        return False
    return bool(body.raw) or (llm.chat_template is None and not body.system)
