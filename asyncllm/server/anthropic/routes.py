"""The routes of Anthropic's Messages."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from asyncllm.server.anthropic import handlers as anthropic
from asyncllm.server.anthropic import schemas as anthropic_answers
from asyncllm.server.anthropic.errors import anthropic_error_response
from asyncllm.server.anthropic.requests import (
    REFERRED_BLOCKS,
    CountTokensRequest,
    MessagesRequest,
)
from asyncllm.server.http.middleware import request_id
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route

#: What their paths begin with.
ROOT: Final = "/v1/messages"

ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/messages",
        handler=anthropic.create_message,
        summary="Answer a conversation, in Anthropic's words",
        body=MessagesRequest,
        answers=(anthropic_answers.AnthropicMessage,),
        event=anthropic_answers.AnthropicEvent,
        named_events=True,
        refusals=GENERATES,
        error=anthropic_answers.AnthropicError,
        write_error=anthropic_error_response,
        refers=REFERRED_BLOCKS,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=anthropic.count_tokens,
        summary="How many tokens a conversation has",
        body=CountTokensRequest,
        answers=(anthropic_answers.TokenCount,),
        refusals=TAKES_JSON,
        error=anthropic_answers.AnthropicError,
        write_error=anthropic_error_response,
        refers=REFERRED_BLOCKS,
    ),
)
_HANDLERS: Final = frozenset(route.handler for route in ROUTES)


def add_header(app: web.Application) -> None:
    """Give the answers of these routes the header that Anthropic's clients look for."""

    async def name_request(request: web.Request, response: web.StreamResponse) -> None:
        if request.match_info.handler in _HANDLERS and (given := request_id.get(None)):
            response.headers["request-id"] = given

    app.on_response_prepare.append(name_request)
