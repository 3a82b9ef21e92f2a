"""POST /api/chat and /api/generate, as Ollama's clients use them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncllm.server.chat.adapter import cut_to_fit, open_chat, renamed
from asyncllm.server.chat.message_reader import Turn
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.chat.scheduling import expect_prompts
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.ollama import conversion as wanted
from asyncllm.server.ollama.models import resolve_model
from asyncllm.server.ollama.reply import (
    OllamaReply,
    Piece,
    chat_words,
    generate_words,
    timestamp,
)
from asyncllm.server.ollama.requests import (
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
)
from asyncllm.server.service import SERVICE
from asyncllm.server.streaming.delivery import Job

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from aiohttp import web

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.types import SchedulingParams


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    asked = await request.app[SERVICE].receive(request, OllamaChatRequest)
    return await _answer(request, asked, began, chat_words, empty=not asked.messages)


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    asked = await request.app[SERVICE].receive(request, OllamaGenerateRequest)
    return await _answer(request, asked, began, generate_words, empty=not asked.prompt)


async def _answer(
    request: web.Request,
    asked: OllamaFields,
    began: int,
    words: Callable[[Piece], dict[str, Any]],
    *,
    empty: bool,
) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    model = resolve_model(service, asked.model)
    service.note_ineffective(wanted.ineffective(asked.options, llm.limits.max_model_len))
    chat = wanted.chat_of(asked, model, llm.chat_reader.formats)
    if empty:  # to load or to unload the model is all that is asked; it stays as it is
        reason = "unload" if wanted.unloads(asked) else "load"
        head = {"model": model, "created_at": timestamp()}
        return json_response({**head, **words(Piece()), "done": True, "done_reason": reason})
    scheduling = service.scheduling(request, chat)
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    with renamed(wanted.NAMES, "completion" if _is_plain(llm, asked) else "chat"):
        turn, job = await _open(llm, asked, chat, scheduling, request[RESERVATION], logprobs)
        reply = OllamaReply(
            model,
            turn,
            words,
            prompt_tokens=len(job.prompt_ids),
            began=began,
            tokenizer=llm.tokenizer if asked.logprobs else None,
        )
        job = cut_to_fit(job, llm.limits.max_model_len)
        return await service.answer(request, [job], reply, chat)


async def _open(
    llm: Model,
    asked: OllamaFields,
    chat: ChatRequest,
    scheduling: SchedulingParams,
    reservation: Reservation,
    logprobs: int | None,
) -> tuple[Turn, Job]:
    """How the answer is to be read, and what to submit for it.

    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    if not _is_plain(llm, asked):
        opened = await open_chat(llm, chat, scheduling, reservation, logprobs=logprobs)
        return opened.conversation.turn(), opened.job
    assert isinstance(asked, OllamaGenerateRequest)
    text = asked.prompt or ""
    params = sampling_params(
        chat, llm.default_params, max_tokens=chat.max_tokens, logprobs=logprobs
    )
    expect_prompts(llm, reservation, [text], 1)
    [job] = await fan_out(llm, [await llm.encode(text)], 1, params, scheduling, chat)
    return Turn(None), job


def _is_plain(llm: Model, asked: OllamaFields) -> bool:
    """Whether the prompt goes to the model as it is, with no template around it."""
    if not isinstance(asked, OllamaGenerateRequest):
        return False
    return bool(asked.raw) or (llm.chat_template is None and not asked.system)
