"""POST /v1/responses, and what may be done with a response afterwards."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from asyncllm.errors import BadRequest, NotFound
from asyncllm.server.chat.adapter import open_chat, renamed
from asyncllm.server.http.answer import encode, json_response
from asyncllm.server.http.api_keys import tenant_of
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.openai.logprobs import chat_logprobs
from asyncllm.server.responses import conversion as wanted
from asyncllm.server.responses.background import BackgroundRun, BackgroundRuns
from asyncllm.server.responses.input import read_history, read_items, referred_ids
from asyncllm.server.responses.reply import ResponseReply
from asyncllm.server.responses.requests import ResponsesRequest
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
    from collections.abc import AsyncIterator, Callable, Sequence

    from asyncllm.server.chat.adapter import OpenedChat
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.responses.input import Item
    from asyncllm.server.service import Service
    from asyncllm.types import TokenLogprob

STORE: Final = web.AppKey("asyncllm_responses", ResponseStore)
RUNS: Final = web.AppKey("asyncllm_background_responses", BackgroundRuns)

_JSON: Final = "application/json"

#: Up to this many items are read on the event loop itself: each takes 5 to 20 us.
INLINE_ITEMS: Final = 256


def add_responses(app: web.Application) -> None:
    """Give the app a memory for responses, and let none outlive it."""
    app[STORE] = ResponseStore()
    runs = app[RUNS] = BackgroundRuns()

    async def end_runs(_app: web.Application) -> AsyncIterator[None]:
        yield
        await runs.aclose()

    app.cleanup_ctx.append(end_runs)


async def create_response(request: web.Request) -> web.StreamResponse:
    service, store = request.app[SERVICE], request.app[STORE]
    asked = await service.receive(request, ResponsesRequest)
    model = service.resolve_model(asked.model)
    tenant = tenant_of(request)
    wanted.check(asked)
    service.note_ineffective(wanted.ineffective(asked))
    # What is stored may be as much as what is sent.
    limit = service.config.max_body_bytes
    found = store.find_items(tenant, referred_ids(asked.input))
    stored = _history(request.app, tenant, asked.previous_response_id)

    def read() -> tuple[list[Item], ChatRequest]:
        items = read_items(asked.input, found, limit)
        return items, wanted.chat_of(asked, read_history(stored, limit) + items)

    count = len(stored) + (0 if isinstance(asked.input, str) else len(asked.input))
    items, chat = read() if count <= INLINE_ITEMS else await asyncio.to_thread(read)
    log = EventLog() if asked.background and asked.stream else None

    def keep(response: dict[str, Any]) -> None:
        if asked.store is not False:
            previous, background = asked.previous_response_id, bool(asked.background)
            output = stored_items(response["output"])
            kept = StoredResponse(
                encode(response), stored_items(items), output, previous, background, log
            )
            store.add(tenant, response["id"], kept)

    with renamed(wanted.NAMES):
        opened = await _open(request, asked, chat)
        reply = ResponseReply(
            _head(asked, chat, opened, model),
            opened.conversation,
            tells=bool(asked.stream),
            keep=keep,
            write_logprobs=_write_logprobs(service, asked),
        )
        if not asked.background:
            return await service.answer(request, [opened.job], reply, chat)
        run = request.app[RUNS].start(request, reply, opened.job, log)
    if log is not None:
        return await log.send(request, -1)
    return json_response(run.reply.response)


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


async def _open(request: web.Request, asked: ResponsesRequest, chat: ChatRequest) -> OpenedChat:
    service = request.app[SERVICE]
    scheduling, logprobs = service.scheduling(request, chat), wanted.logprobs_of(asked)

    async def open_with(messages: list[dict[str, Any]]) -> OpenedChat:
        chat.messages = messages
        reservation = request[RESERVATION]
        return await open_chat(service.llm, chat, scheduling, reservation, logprobs=logprobs)

    if asked.truncation == "auto":
        return await open_fitting(chat.messages, open_with, service.llm.limits.max_model_len)
    return await open_with(chat.messages)


def _write_logprobs(
    service: Service, asked: ResponsesRequest
) -> Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]] | None:
    if wanted.logprobs_of(asked) is None:
        return None
    return lambda entries: chat_logprobs(entries, service.llm.tokenizer)["content"]


def _head(
    asked: ResponsesRequest, chat: ChatRequest, opened: OpenedChat, model: str
) -> dict[str, Any]:
    """What of a response is known before it is made."""
    params = opened.job.params
    form = wanted.text_format(asked)
    format = {
        name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None
    }
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if asked.background else "in_progress",
        "background": bool(asked.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": chat.max_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": params.temperature,
        "text": {"format": format},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


async def retrieve_response(request: web.Request) -> web.StreamResponse:
    """The response as it stands; or its events, also those still to come."""
    tenant, id = _asked_for(request)
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
    tenant, id = _asked_for(request)
    run = request.app[RUNS].find(tenant, id)
    if run is not None:
        run.abort()
    if request.app[STORE].remove(tenant, id) is None:
        raise _not_found(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def cancel_response(request: web.Request) -> web.Response:
    """End a response that is made in the background; of one that has ended, nothing changes."""
    tenant, id = _asked_for(request)
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
    """What a response was made of: its input, and before that what it continues."""
    tenant, id = _asked_for(request)
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
        {
            "object": "list",
            "data": [msgspec.Raw(item.json) for item in page],
            "first_id": page[0].id if page else "",
            "last_id": page[-1].id if page else "",
            "has_more": len(items) > limit,
        }
    )


def _asked_for(request: web.Request) -> tuple[str, str]:
    """The tenant who asks, and the id of the response."""
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
