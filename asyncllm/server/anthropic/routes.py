"""The routes of Anthropic's Messages."""

from __future__ import annotations

from functools import partial
from typing import Final

from aiohttp import web

from asyncllm.server.anthropic.errors import anthropic_error_response
from asyncllm.server.anthropic.handlers import count_tokens, create_message
from asyncllm.server.anthropic.requests import REFERRED_BLOCKS, CountTokensRequest, MessagesRequest
from asyncllm.server.anthropic.schemas import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    TokenCount,
)
from asyncllm.server.http.middleware import request_id
from asyncllm.server.http.route import GENERATES, TAKES_JSON, Route

#: What their paths begin with.
ROOT: Final = "/v1/messages"

_post = partial(
    Route,
    method="POST",
    error=AnthropicError,
    write_error=anthropic_error_response,
    refers=REFERRED_BLOCKS,
)

ROUTES: Final = (
    _post(
        path="/v1/messages",
        handler=create_message,
        summary="Answer a conversation, in Anthropic's words",
        body=MessagesRequest,
        answers=(AnthropicMessage,),
        event=AnthropicEvent,
        named_events=True,
        refusals=GENERATES,
    ),
    _post(
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        summary="How many tokens a conversation has",
        body=CountTokensRequest,
        answers=(TokenCount,),
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
