"""The routes of OpenAI's Responses, and the handlers of those for responses that are there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final, cast

from aiohttp import web

from asyncllm.errors import BadRequest, NotFound
from asyncllm.server.arrivals.names import home_of_id
from asyncllm.server.http.answer import json_body, json_response
from asyncllm.server.http.route import GENERATES, Route
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.responses import create, schemas
from asyncllm.server.responses.background import BackgroundRun, BackgroundRuns
from asyncllm.server.responses.create import RUNS, STORE
from asyncllm.server.responses.input import decode_item
from asyncllm.server.responses.requests import REFERRED_ITEMS, CompactRequest, ResponsesRequest
from asyncllm.server.responses.store import ResponseStore, StoredResponse

# What a query may say: choices, whose first is the default, and schemas of numbers.
_STREAM: Final = ("false", "true")
_AFTER: Final = {"type": "integer", "minimum": -1, "maximum": 2**31}
_ORDER: Final = ("desc", "asc")
_LIMIT: Final = {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}


def add_responses(app: web.Application) -> None:
    """Give the app a store for responses, and cancel those in progress when it ends."""
    app[STORE] = ResponseStore()
    runs = app[RUNS] = BackgroundRuns()

    async def end_runs(_app: web.Application) -> AsyncIterator[None]:
        yield
        await runs.aclose()

    app.cleanup_ctx.append(end_runs)


async def retrieve_response(request: web.Request) -> web.StreamResponse:
    """The response as it stands, or its events, including those still to come."""
    stream = _choice(request, "stream", _STREAM) == "true"
    found = _find(request)
    if not stream:
        return json_body(found.body)
    if found.log is None:
        raise BadRequest("only what was streamed in the background can be", param="stream")
    return await found.log.send(request, _number(request, "starting_after", _AFTER))


async def delete_response(request: web.Request) -> web.Response:
    tenant, id = _address(request)
    run = request.app[RUNS].find(tenant, id)
    if run is not None:
        run.abort()
    if request.app[STORE].remove(tenant, id) is None:
        raise _not_found(id)
    return json_response(schemas.DeletedResponse(id=id, deleted=True))


async def cancel_response(request: web.Request) -> web.Response:
    """End a background response; one that has ended does not change."""
    found = _find(request)
    if not found.background:
        raise BadRequest("only a response with background=true can be cancelled", param="id")
    found.abort()
    return json_body(found.body)


async def list_input_items(request: web.Request) -> web.Response:
    """The items that a response continues, and its own input."""
    tenant, id = _address(request)
    order = _choice(request, "order", _ORDER)
    limit = _number(request, "limit", _LIMIT)
    store = request.app[STORE]
    stored = store.get(tenant, id)
    if stored is None:
        raise _not_found(id)
    items = [*(store.before(tenant, stored) or ()), *stored.input]
    if order == "desc":
        items.reverse()
    if (after := request.query.get("after")) is not None:
        place = next((i for i, item in enumerate(items, 1) if item.id == after), None)
        if place is None:
            raise BadRequest(f"there is no item {after!r}", param="after")
        items = items[place:]
    page = items[:limit]
    return json_response(
        schemas.ResponseItems(
            data=[decode_item(item.json) for item in page],
            first_id=page[0].id if page else "",
            last_id=page[-1].id if page else "",
            has_more=len(items) > limit,
        )
    )


def _address(request: web.Request) -> tuple[str, str]:
    """The tenant, and the id of the response."""
    return tenant_of(request), request.match_info["id"]


def _find(request: web.Request) -> BackgroundRun | StoredResponse:
    """
    Raises:
        NotFound: the response is neither in progress nor kept.
    """
    tenant, id = _address(request)
    found = request.app[RUNS].find(tenant, id) or request.app[STORE].get(tenant, id)
    if found is None:
        raise _not_found(id)
    return found


def _not_found(id: str) -> NotFound:
    return NotFound(f"Response with id {id!r} not found", param="id")


def _choice(request: web.Request, name: str, values: tuple[str, ...]) -> str:
    given = request.query.get(name, values[0])
    if given not in values:
        raise BadRequest(f"{name} must be {' or '.join(values)}", param=name)
    return given


def _number(request: web.Request, name: str, schema: Mapping[str, Any]) -> int:
    least, most = schema["minimum"], schema["maximum"]
    given = request.query.get(name)
    if given is None:
        return cast(int, schema.get("default", least))
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise BadRequest(f"{name} must be between {least} and {most}", param=name)
    return number


_get, _post = partial(Route, "GET"), partial(Route, "POST")

ROUTES: Final = (
    _post(
        "/v1/responses",
        create.create_response,
        "Answer a conversation, and keep the answer",
        body=ResponsesRequest,
        answers=(schemas.Response,),
        event=schemas.ResponseEvent,
        named_events=True,
        refusals=GENERATES,
        refers=REFERRED_ITEMS,
        came=create.has_item,
    ),
    _post(
        "/v1/responses/compact",
        create.compact_response,
        "Put a summary in the place of a conversation",
        body=CompactRequest,
        answers=(schemas.CompactedResponse,),
        refusals=GENERATES,
        refers=REFERRED_ITEMS,
        came=create.has_item,
    ),
    _get(
        "/v1/responses/{id}",
        retrieve_response,
        "A response that is kept or being made",
        home=home_of_id,
        answers=(schemas.Response,),
        event=schemas.ResponseEvent,
        named_events=True,
        query={"stream": _STREAM, "starting_after": _AFTER},
        refusals=(400, 404),
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        delete_response,
        "Keep a response no longer",
        home=home_of_id,
        answers=(schemas.DeletedResponse,),
        refusals=(404,),
    ),
    _post(
        "/v1/responses/{id}/cancel",
        cancel_response,
        "End a response that is made in the background",
        home=home_of_id,
        answers=(schemas.Response,),
        refusals=(400, 404),
    ),
    _get(
        "/v1/responses/{id}/input_items",
        list_input_items,
        "What a response was made of",
        home=home_of_id,
        answers=(schemas.ResponseItems,),
        query={"order": _ORDER, "limit": _LIMIT, "after": {"type": "string"}},
        refusals=(400, 404),
    ),
)
