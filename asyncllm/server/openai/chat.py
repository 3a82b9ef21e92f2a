"""POST /v1/chat/completions, and /render below it: what a chat would send to the model."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from functools import partial

from aiohttp import web

from asyncllm.engine.requests.check import check_request
from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.messages import read_chat
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.http.parse import unsupported
from asyncllm.server.openai.beams import answer_beams
from asyncllm.server.openai.chat_reply import ChatReply
from asyncllm.server.openai.reply import check_scoring
from asyncllm.server.openai.requests import (
    check_options,
    ineffective_fields,
    logprobs_needed,
    num_generated,
)
from asyncllm.server.openai.schemas import Rendered
from asyncllm.server.service import SERVICE, Service
from asyncllm.types import SchedulingParams


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, ChatRequest)
    model = service.resolve_model(body.model)
    with _named(body):
        conversation, scheduling = await _open(service, request, body)
        prompts, params = [conversation.prompt_ids], conversation.params
        reply = await read_large(ChatReply, body, model, conversation, service.llm.tokenizer)
        reply.sign(service.fingerprint)
        if body.use_beam_search:
            return await answer_beams(service, request, prompts, params, scheduling, reply, body)
        n = reply.best_of
        return await service.answer(request, prompts, params, scheduling, reply, body, n)


async def render_chat(request: web.Request) -> web.Response:
    """Checks everything that a chat checks before it is queued."""
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, ChatRequest)
    service.resolve_model(body.model)
    with _named(body):
        conversation, scheduling = await _open(service, request, body)
        prompt = conversation.prompt_ids
        check_scoring(body, [prompt], body.prompt_logprobs)
        [job] = await service.jobs([prompt], conversation.params, scheduling, body)
        check_request(prompt, job.params, llm.limits)
    decode = partial(llm.tokenizer.decode, prompt, skip_special_tokens=False)
    text = await asyncio.to_thread(decode)
    return json_response(Rendered(prompt=text, token_ids=prompt, count=len(prompt)))


def _named(body: ChatRequest) -> AbstractContextManager[None]:
    """Have errors name the request's fields; the engine knows prompts and max_tokens only."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return renamed(names)


async def _open(
    service: Service, request: web.Request, body: ChatRequest
) -> tuple[Conversation, SchedulingParams]:
    """Read a request as far as possible without the engine, and make its prompt.

    What is left out is named in the answer's header.

    Raises:
        QueueFull, BadRequest: as in ``open_conversation``; ``param`` may be the engine's name.
    """
    llm = service.llm
    service.note_ineffective(ineffective_fields(body))
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs", param="top_logprobs")
    if body.echo:
        raise unsupported("echo")
    if body.add_special_tokens:
        raise unsupported("add_special_tokens")  # the template has written them already
    check_options(body, 1, llm.limits.max_waiting)
    count = num_generated(body)
    request[RESERVATION].expect(count, count)
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    logprobs = logprobs_needed(body, wanted)
    scheduling = service.scheduling(request, body)
    params = sampling_params(
        body,
        llm.default_params,
        max_tokens=body.max_completion_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    service.note_ineffective(await read_large(read_chat, body))
    conversation = await open_conversation(llm, body, params, request[RESERVATION])
    service.note_ineffective(conversation.ineffective)
    if body.thinking_token_budget is not None and llm.chat_reader.formats.channels is not None:
        service.note_ineffective(["thinking_token_budget"])
    return conversation, scheduling
