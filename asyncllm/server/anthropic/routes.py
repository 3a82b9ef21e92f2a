"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients use them."""

from __future__ import annotations

from functools import partial
from typing import Final

from aiohttp import web

from asyncllm.server.anthropic import schemas
from asyncllm.server.anthropic.conversion import NAMES, cache_ttl, chat_of, ineffective
from asyncllm.server.anthropic.reply import MessageReply, anthropic_error_response
from asyncllm.server.anthropic.requests import REFERRED_BLOCKS, CountTokensRequest, MessagesRequest
from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import encode_messages, open_conversation
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import RESERVATION, request_id
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route
from asyncllm.server.service import SERVICE


async def create_message(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, MessagesRequest)
    model = service.resolve_model(body.model)
    left_out = ineffective(body)
    chat, limits = await read_large(chat_of, body, left_out), service.llm.limits
    service.note_ineffective(left_out)
    if chat.cache_ttl_s is None and (ttl := await read_large(cache_ttl, body)) is not None:
        chat.cache_ttl_s = min(ttl, limits.max_cache_ttl)  # clients do not know the limit
    scheduling = service.scheduling(request, chat)
    with renamed(NAMES, "anthropic"):
        params = sampling_params(chat, service.llm.default_params)
        # Clients send the model's own limit of output tokens with every request.
        conversation = await open_conversation(
            service.llm, chat, params, request[RESERVATION], cut=True
        )
        service.note_ineffective(conversation.ineffective)
        kept = bool(chat.cache_ttl_s) and limits.prefix_caching
        reply = MessageReply(
            model,
            conversation,
            context=limits.max_model_len,
            kept_unit=limits.page_size if kept else None,
        )
        prompts, params = [conversation.prompt_ids], conversation.params
        return await service.answer(request, prompts, params, scheduling, reply, chat)


async def count_tokens(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    body = await service.read(request, CountTokensRequest)
    service.resolve_model(body.model)
    left_out: list[str] = []
    chat = await read_large(chat_of, body, left_out)
    service.note_ineffective(left_out)
    effort = chat.reasoning_effort
    prompt = await encode_messages(service.llm, chat, reasoning_effort=effort, any_length=True)
    return json_response(schemas.TokenCount(input_tokens=len(prompt)))


#: What their paths begin with.
ROOT: Final = "/v1/messages"

_post = partial(
    Route,
    "POST",
    error=schemas.AnthropicError,
    write_error=anthropic_error_response,
    refers=REFERRED_BLOCKS,
)

ROUTES: Final = (
    _post(
        "/v1/messages",
        create_message,
        "Answer a conversation, in Anthropic's words",
        body=MessagesRequest,
        answers=(schemas.AnthropicMessage,),
        event=schemas.AnthropicEvent,
        named_events=True,
        refusals=GENERATES,
    ),
    _post(
        "/v1/messages/count_tokens",
        count_tokens,
        "How many tokens a conversation has",
        body=CountTokensRequest,
        answers=(schemas.TokenCount,),
        refusals=TAKES_JSON,
    ),
)
HANDLERS: Final = frozenset(route.handler for route in ROUTES)


def add_header(app: web.Application) -> None:
    """Give these routes' answers the header in which Anthropic's clients look for the id."""

    async def name_request(request: web.Request, response: web.StreamResponse) -> None:
        if request.match_info.handler in HANDLERS and (given := request_id.get(None)):
            response.headers["request-id"] = given

    app.on_response_prepare.append(name_request)
