"""POST /v1/chat/completions/render: what a chat request would send to the model."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from asyncllm.engine.requests.check import check_request
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.chat.sampling import fan_out
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.openai.chat import named_for_chat, open_chat_request
from asyncllm.server.openai.schemas import Rendered
from asyncllm.server.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web


async def render_chat(request: web.Request) -> web.Response:
    """Checks everything that a chat checks before it is queued."""
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, ChatRequest)
    service.resolve_model(body.model)
    scheduling = service.scheduling(request, body)
    with named_for_chat(body):
        conversation = await open_chat_request(service, body, request[RESERVATION])
        prompt = conversation.prompt_ids
        [job] = await fan_out(llm, [prompt], 1, conversation.params, scheduling, body)
        check_request(prompt, job.params, llm.limits)
    decode = partial(llm.tokenizer.decode, prompt, skip_special_tokens=False)
    text = await asyncio.to_thread(decode)
    return json_response(Rendered(prompt=text, token_ids=prompt, count=len(prompt)))
