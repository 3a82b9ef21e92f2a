"""POST /v1/responses and /v1/responses/compact."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.arrivals.forwarding import seek
from asyncllm.server.arrivals.names import NUMBERS, home_of_id
from asyncllm.server.chat.adapter import renamed
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.large import caller_of_loop, read_large
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.answer import encode, json_body
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.responses import conversion
from asyncllm.server.responses.background import BackgroundRuns
from asyncllm.server.responses.input import ReadInput, read_history, referred_ids
from asyncllm.server.responses.item_schemas import Item
from asyncllm.server.responses.reply import CompactionReply, ResponseReply, ask_for_summary
from asyncllm.server.responses.requests import CompactRequest, ResponsesRequest
from asyncllm.server.responses.schemas import Response
from asyncllm.server.responses.store import (
    EventLog,
    ResponseStore,
    StoredItem,
    StoredResponse,
    stored_items,
)
from asyncllm.server.responses.tools import Offers
from asyncllm.server.service import SERVICE
from asyncllm.types import SamplingParams

STORE: Final = web.AppKey("asyncllm_responses", ResponseStore)
RUNS: Final = web.AppKey("asyncllm_background_responses", BackgroundRuns)

#: Messages of these roles at the beginning are never dropped.
_STAYING: Final = ("system", "developer")
#: Up to this many stored items are read on the event loop; each takes 5 to 20 us.
INLINE_ITEMS: Final = 256


async def create_response(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, ResponsesRequest, home=_home)
    return await _respond(request, body)


async def compact_response(request: web.Request) -> web.StreamResponse:
    """A conversation's messages of the user, and a summary of the rest; nothing is stored."""
    service = request.app[SERVICE]
    body = await service.receive(request, CompactRequest, home=_home)
    if body.input is None:
        if body.previous_response_id is None:
            raise BadRequest("input is required", param="input")
        body.input = []
    body.store, body.stream, body.background = False, None, None
    return await _respond(request, body, only_compacts=True)


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


async def _respond(
    request: web.Request, body: ResponsesRequest, *, only_compacts: bool = False
) -> web.StreamResponse:
    service, store = request.app[SERVICE], request.app[STORE]
    model = service.resolve_model(body.model)
    tenant = tenant_of(request)
    conversion.check(body)
    service.note_ineffective(conversion.ineffective(body))
    # Stored items may be as long as a body.
    limit = service.config.max_body_bytes
    found = store.find_items(tenant, referred_ids(body.input))
    stored = _history(request.app, tenant, body.previous_response_id)

    def read() -> tuple[ReadInput, tuple[StoredItem, ...], list[Item], tuple[ChatRequest, Offers]]:
        given = ReadInput(body.input, found, limit)
        kept = stored_items(given.items) if body.store is not False else ()
        items = read_history(stored, limit) + given.items
        return given, kept, items, conversion.chat_of(body, items, given.left_out)

    many = len(stored) > INLINE_ITEMS
    read_it = asyncio.to_thread(read) if many else read_large(read)
    given, own_items, items, (chat, offers) = await read_it
    on_loop = caller_of_loop()  # long answers are made in a thread
    service.note_ineffective(given.left_out)
    compacts = only_compacts or given.compacts
    if compacts:
        ask_for_summary(chat, service.llm.limits.max_model_len)
    log = EventLog() if body.background and body.stream else None

    def keep(response: Response) -> None:
        if response.store:
            kept = StoredResponse(
                body=encode(response),
                input=own_items,
                output=stored_items(response.output),
                previous=response.previous_response_id,
                background=response.background,
                log=log,
            )
            on_loop(store.add, tenant, response.id, kept)

    with renamed(conversion.NAMES):
        logprobs, scheduling = conversion.logprobs_of(body), service.scheduling(request, chat)
        params = sampling_params(chat, service.llm.default_params, logprobs=logprobs)
        conversation = await _open(request, body, chat, params, fits=compacts)
        service.note_ineffective(conversation.ineffective)
        prompts, params = [conversation.prompt_ids], conversation.params
        make: Callable[..., ResponseReply] = ResponseReply
        if compacts:
            conversation = conversation._replace(tools=())
            make = partial(CompactionReply, kept=items if only_compacts else None)
        reply = make(
            conversion.response_of(body, chat, params, model, request.app[NUMBERS]),
            conversation,
            offers=offers,
            streams=bool(body.stream),
            keep=keep,
            tokenizer=None if logprobs is None else service.llm.tokenizer,
            seals=conversion.WITH_REASONING in (body.include or ()),
        )
        if not body.background:
            return await service.answer(request, prompts, params, scheduling, reply, chat)
        [job] = await service.jobs(prompts, params, scheduling, chat)
        run = await request.app[RUNS].start(request, reply, job, log)
    if log is not None:
        return await log.send(request, -1)
    return json_body(run.body)


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


async def _open(
    request: web.Request,
    body: ResponsesRequest,
    chat: ChatRequest,
    params: SamplingParams,
    *,
    fits: bool,
) -> Conversation:
    """The chat, without the earliest turns if the request allows that, or if it ``fits`` then."""
    llm = request.app[SERVICE].llm

    async def open_with(messages: list[dict[str, Any]]) -> Conversation:
        chat.messages = messages
        return await open_conversation(llm, chat, params, request[RESERVATION])

    if fits or body.truncation == "auto":
        return await _open_fitting(chat.messages, open_with, llm.limits.max_model_len)
    return await open_with(chat.messages)


async def _open_fitting(
    messages: list[dict[str, Any]],
    open_with: Callable[[list[dict[str, Any]]], Awaitable[Conversation]],
    context: int,
) -> Conversation:
    """Open the conversation without the fewest possible of its earliest turns.

    System messages at the beginning stay. A turn begins with a user's message.

    Args:
        context: tokens of prompt and answer together.

    Raises:
        BadRequest: not even the last turn fits.
    """
    roles = [message["role"] for message in messages]
    head = next((i for i, role in enumerate(roles) if role not in _STAYING), len(roles))
    turns = [i for i, role in enumerate(roles) if role == "user" and i > head]
    starts = [head, *turns]

    async def fits(start: int) -> Conversation | None:
        try:
            opened = await open_with([*messages[:head], *messages[start:]])
        except BadRequest as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        room = context - len(opened.prompt_ids)
        return opened if room >= (opened.params.max_tokens or 1) else None

    if (opened := await fits(head)) is not None:
        return opened
    low, high = 1, len(starts)
    found = None
    while low < high:
        middle = (low + high) // 2
        if (opened := await fits(starts[middle])) is not None:
            found, high = opened, middle
        else:
            low = middle + 1
    # The last turn alone is too long: the error is the engine's.
    return found or await open_with([*messages[:head], *messages[starts[-1] :]])
