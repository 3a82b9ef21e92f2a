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
from asyncllm.server.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web


async def render_chat(request: web.Request) -> web.Response:
    """Checked as a chat is, up to where it would be queued."""
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, ChatRequest)
    service.resolve_model(asked.model)
    scheduling = service.scheduling(request, asked)
    with named_for_chat(asked):
        conversation = await open_chat_request(llm, asked, request[RESERVATION])
        prompt = conversation.prompt_ids
        [job] = await fan_out(llm, [prompt], 1, conversation.params, scheduling, asked)
        check_request(prompt, job.params, llm.limits)
    decode = partial(llm.tokenizer.decode, prompt, skip_special_tokens=False)
    text = await asyncio.to_thread(decode)
    return json_response({"prompt": text, "token_ids": prompt, "count": len(prompt)})
