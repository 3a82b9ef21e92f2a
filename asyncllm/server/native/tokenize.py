"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from asyncllm.errors import BadRequest
from asyncllm.server.chat.messages import allow_tools, encode_messages
from asyncllm.server.http.answer import json_response
from asyncllm.server.native.requests import DetokenizeRequest, TokenizeRequest
from asyncllm.server.openai.logprobs import token_text
from asyncllm.server.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web


async def tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.read(request, TokenizeRequest)
    service.resolve_model(asked.model)
    if asked.messages is not None and asked.prompt is not None:
        raise BadRequest("prompt and messages exclude each other", param="messages")
    allow_tools(asked)
    if asked.messages is not None:
        tokens = await encode_messages(llm, asked.messages, asked)
    elif asked.prompt is not None:
        special = asked.add_special_tokens is not False
        tokens = await llm.encode(asked.prompt, add_special_tokens=special)
    else:
        raise BadRequest("prompt or messages is required", param="prompt")
    answer = {"count": len(tokens), "max_model_len": llm.limits.max_model_len, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [token_text(llm.tokenizer.token_bytes(token)) for token in tokens]
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = await service.read(request, DetokenizeRequest)
    service.resolve_model(asked.model)
    limit = service.llm.limits.vocab_size
    if max(asked.tokens, default=0) >= limit:
        raise BadRequest(f"tokens must be between 0 and {limit - 1}", param="tokens")
    decode_all = partial(service.llm.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    text = await asyncio.to_thread(decode_all)
    return json_response({"prompt": text})
