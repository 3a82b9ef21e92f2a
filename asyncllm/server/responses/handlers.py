"""The handlers of /v1/responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from asyncllm.errors import BadRequest, NotFound
from asyncllm.server.arrivals.names import home_of_id
from asyncllm.server.arrivals.others import seek
from asyncllm.server.arrivals.routed import REPLICA
from asyncllm.server.chat.adapter import open_chat, renamed
from asyncllm.server.http.answer import encode, json_response
from asyncllm.server.http.api_keys import tenant_of
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.responses import conversion
from asyncllm.server.responses.background import BackgroundRun, BackgroundRuns
from asyncllm.server.responses.input import decode_item, read_history, read_items, referred_ids
from asyncllm.server.responses.reply import ResponseReply
from asyncllm.server.responses.requests import ResponsesRequest
from asyncllm.server.responses.schemas import DeletedResponse, ResponseItems
from asyncllm.server.responses.store import (
    EventLog,
    ResponseStore,
    StoredItem,
    StoredResponse,
    stored_items,
)
from asyncllm.server.responses.truncation import open_fitting
from asyncllm.server.service import SERVICE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncllm.server.chat.adapter import OpenedChat
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.responses.schemas import Item, Response

STORE: Final = web.AppKey("asyncllm_responses", ResponseStore)
RUNS: Final = web.AppKey("asyncllm_background_responses", BackgroundRuns)

_JSON: Final = "application/json"

#: Up to this many items are read on the event loop; each takes 5 to 20 us.
INLINE_ITEMS: Final = 256


def add_responses(app: web.Application) -> None:
    """Give the app a store for responses, and cancel those in progress when it ends."""
    app[STORE] = ResponseStore()
    runs = app[RUNS] = BackgroundRuns()

    async def end_runs(_app: web.Application) -> AsyncIterator[None]:
        yield
        await runs.aclose()

    app.cleanup_ctx.append(end_runs)


async def create_response(request: web.Request) -> web.StreamResponse:
    service, store = request.app[SERVICE], request.app[STORE]
    body = await service.receive(request, ResponsesRequest, home=_home)
    model = service.resolve_model(body.model)
    tenant = tenant_of(request)
    conversion.check(body)
    service.note_ineffective(conversion.ineffective(body))
    # Stored items may be as long as a body.
    limit = service.config.max_body_bytes
    found = store.find_items(tenant, referred_ids(body.input))
    stored = _history(request.app, tenant, body.previous_response_id)

    def read() -> tuple[list[Item], ChatRequest]:
        items = read_items(body.input, found, limit)
        return items, conversion.chat_of(body, read_history(stored, limit) + items)

    count = len(stored) + (0 if isinstance(body.input, str) else len(body.input))
    items, chat = read() if count <= INLINE_ITEMS else await asyncio.to_thread(read)
    log = EventLog() if body.background and body.stream else None

    def keep(response: Response) -> None:
        if response.store:
            kept = StoredResponse(
                body=encode(response),
                input=stored_items(items),
                output=stored_items(response.output),
                previous=response.previous_response_id,
                background=response.background,
                log=log,
            )
            store.add(tenant, response.id, kept)

    with renamed(conversion.NAMES):
        opened = await _open(request, body, chat)
        reply = ResponseReply(
            conversion.response_of(body, chat, opened.job.params, model, request.app.get(REPLICA)),
            opened.conversation,
            streams=bool(body.stream),
            keep=keep,
            tokenizer=None if conversion.logprobs_of(body) is None else service.llm.tokenizer,
        )
        if not body.background:
            return await service.answer(request, [opened.job], reply, chat)
        run = request.app[RUNS].start(request, reply, opened.job, log)
    if log is not None:
        return await log.send(request, -1)
    return json_response(run.reply.response)


async def _home(request: web.Request, body: ResponsesRequest) -> int | None:
    """Which of several replicas has what the request continues, or refers to."""
    if body.previous_response_id is not None:
        return home_of_id(body.previous_response_id)
    item = min(referred_ids(body.input), default=None)
    if item is None or has_item(request, item) is not None:
        return None
    return await seek(request, item)


def has_item(request: web.Request, id: str) -> float | None:
    """None if there is no such item here."""
    return 0.0 if request.app[STORE].find_items(tenant_of(request), (id,)) else None


def _history(app: web.Application, tenant: str, previous: str | None) -> list[StoredItem]:
    if previous is None:
        return []
    param = "previous_response_id"
    if app[RUNS].find(tenant, previous) is not None:
        raise BadRequest(f"response {previous!r} has not ended yet", param=param)
    history = app[STORE].history(tenant, previous)
    if history is None:
        code = "previous_response_not_found"
        raise BadRequest(
            f"Previous response with id {previous!r} not found", param=param, code=code
        )
    return history


async def _open(request: web.Request, body: ResponsesRequest, chat: ChatRequest) -> OpenedChat:
    service = request.app[SERVICE]
    scheduling, logprobs = service.scheduling(request, chat), conversion.logprobs_of(body)

    async def open_with(messages: list[dict[str, Any]]) -> OpenedChat:
        chat.messages = messages
        reservation = request[RESERVATION]
        return await open_chat(service.llm, chat, scheduling, reservation, logprobs=logprobs)

    if body.truncation == "auto":
        return await open_fitting(chat.messages, open_with, service.llm.limits.max_model_len)
    return await open_with(chat.messages)


async def retrieve_response(request: web.Request) -> web.StreamResponse:
    """The response as it stands, or its events, including those still to come."""
    tenant, id = _address(request)
    stream = _choice(request, "stream", ("false", "true")) == "true"
    run = request.app[RUNS].find(tenant, id)
    stored = None if run is not None else request.app[STORE].get(tenant, id)
    if run is None and stored is None:
        raise _not_found(id)
    if stream:
        log = (run or stored).log  # type: ignore[union-attr]
        if log is None:
            raise BadRequest("only what was streamed in the background can be", param="stream")
        return await log.send(request, _number(request, "starting_after", -1, -1, 2**31))
    if run is not None:
        return json_response(run.reply.response)
    assert stored is not None
    return web.Response(body=stored.body, content_type=_JSON)


async def delete_response(request: web.Request) -> web.Response:
    tenant, id = _address(request)
    run = request.app[RUNS].find(tenant, id)
    if run is not None:
        run.abort()
    if request.app[STORE].remove(tenant, id) is None:
        raise _not_found(id)
    return json_response(DeletedResponse(id=id, deleted=True))


async def cancel_response(request: web.Request) -> web.Response:
    """End a background response; one that has ended does not change."""
    tenant, id = _address(request)
    run: BackgroundRun | None = request.app[RUNS].find(tenant, id)
    if run is not None:
        run.abort()
        return json_response(run.reply.response)
    stored = request.app[STORE].get(tenant, id)
    if stored is None:
        raise _not_found(id)
    if not stored.background:
        raise BadRequest("only a response with background=true can be cancelled", param="id")
    return web.Response(body=stored.body, content_type=_JSON)


async def list_input_items(request: web.Request) -> web.Response:
    """The items that a response continues, and its own input."""
    tenant, id = _address(request)
    order = _choice(request, "order", ("desc", "asc"))
    limit = _number(request, "limit", 20, 1, 100)
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
        ResponseItems(
            data=[decode_item(item.json) for item in page],
            first_id=page[0].id if page else "",
            last_id=page[-1].id if page else "",
            has_more=len(items) > limit,
        )
    )


def _address(request: web.Request) -> tuple[str, str]:
    """The tenant, and the id of the response."""
    return tenant_of(request), request.match_info["id"]


def _not_found(id: str) -> NotFound:
    return NotFound(f"Response with id {id!r} not found", param="id")


def _choice(request: web.Request, name: str, values: tuple[str, ...]) -> str:
    given = request.query.get(name, values[0])
    if given not in values:
        raise BadRequest(f"{name} must be {' or '.join(values)}", param=name)
    return given


def _number(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    try:
        number = int(given)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise BadRequest(f"{name} must be between {least} and {most}", param=name)
    return number
