"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.chat.conversation import encode_messages
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.messages import read_chat
from asyncllm.server.http.answer import json_response
from asyncllm.server.model import Tokenizer
from asyncllm.server.native.requests import DetokenizeRequest, TokenizeRequest
from asyncllm.server.native.schemas import Detokenized, Tokenized
from asyncllm.server.openai.logprobs import token_text
from asyncllm.server.service import SERVICE


async def tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.read(request, TokenizeRequest)
    service.resolve_model(body.model)
    if body.messages is not None and body.prompt is not None:
        raise BadRequest("prompt and messages exclude each other", param="messages")
    if body.messages is not None:
        service.note_ineffective(await read_large(read_chat, body))
        tokens = await encode_messages(llm, body)
    elif body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await llm.encode(body.prompt, add_special_tokens=special)
    else:
        raise BadRequest("prompt or messages is required", param="prompt")
    answer = Tokenized(count=len(tokens), max_model_len=llm.limits.max_model_len, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = await read_large(_texts, llm.tokenizer, tokens)
    return json_response(answer)


def _texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [token_text(tokenizer.token_bytes(token)) for token in tokens]


async def detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    body = await service.read(request, DetokenizeRequest)
    service.resolve_model(body.model)
    limit = service.llm.limits.vocab_size
    if max(body.tokens, default=0) >= limit:
        raise BadRequest(f"tokens must be between 0 and {limit - 1}", param="tokens")
    decode_all = partial(service.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(Detokenized(prompt=await asyncio.to_thread(decode_all)))
