"""The routes of OpenAI's Responses."""

from __future__ import annotations

from typing import Final

from asyncllm.server.arrivals.names import home_of_id
from asyncllm.server.http.route import GENERATES, Route
from asyncllm.server.responses import create, handlers, schemas
from asyncllm.server.responses.requests import (
    REFERRED_ITEMS,
    CompactRequest,
    ResponsesRequest,
)

ROUTES: Final = (
    Route(
        method="POST",
        path="/v1/responses",
        handler=create.create_response,
        summary="Answer a conversation, and keep the answer",
        body=ResponsesRequest,
        answers=(schemas.Response,),
        event=schemas.ResponseEvent,
        named_events=True,
        refusals=GENERATES,
        refers=REFERRED_ITEMS,
        came=create.has_item,
    ),
    Route(
        method="POST",
        path="/v1/responses/compact",
        handler=create.compact_response,
        summary="Put a summary in the place of a conversation",
        body=CompactRequest,
        answers=(schemas.CompactedResponse,),
        refusals=GENERATES,
        refers=REFERRED_ITEMS,
        came=create.has_item,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        home=home_of_id,
        handler=handlers.retrieve_response,
        summary="A response that is kept or being made",
        answers=(schemas.Response,),
        event=schemas.ResponseEvent,
        named_events=True,
        query={
            "stream": ("false", "true"),
            "starting_after": {"type": "integer", "minimum": -1, "maximum": 2**31},
        },
        refusals=(400, 404),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{id}",
        home=home_of_id,
        handler=handlers.delete_response,
        summary="Keep a response no longer",
        answers=(schemas.DeletedResponse,),
        refusals=(404,),
    ),
    Route(
        method="POST",
        path="/v1/responses/{id}/cancel",
        home=home_of_id,
        handler=handlers.cancel_response,
        summary="End a response that is made in the background",
        answers=(schemas.Response,),
        refusals=(400, 404),
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}/input_items",
        home=home_of_id,
        handler=handlers.list_input_items,
        summary="What a response was made of",
        answers=(schemas.ResponseItems,),
        query={
            "order": ("desc", "asc"),
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "after": {"type": "string"},
        },
        refusals=(400, 404),
    ),
)
