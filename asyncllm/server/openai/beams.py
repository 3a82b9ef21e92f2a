"""Beam search over HTTP: ``use_beam_search``, with ``best_of`` or ``n`` beams and ``n`` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import OpenAIFields
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.limits.accounts import UNSTATED_TOKENS, Work
from asyncllm.server.openai.requests import num_generated
from asyncllm.server.service import Service
from asyncllm.server.streaming.delivery import Delivery, Reply, WholeAnswer
from asyncllm.server.streaming.sse import EventStream
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenDelta
from asyncllm.types.beam_search import BeamSearchParams, Search

#: Parameters of a search, and parameters of drawing, which it ignores.
_SHARED: Final = frozenset(BeamSearchParams.__struct_fields__).intersection(
    SamplingParams.__struct_fields__
) - {"temperature"}
_OF_DRAWING: Final = frozenset(("min_p", "seed", "temperature", "top_k", "top_p"))
_NEUTRAL: Final = SamplingParams()


async def answer_beams(
    service: Service,
    request: web.Request,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    scheduling: SchedulingParams,
    reply: Reply,
    body: OpenAIFields,
) -> web.StreamResponse:
    """Search, and answer with each prompt's best beams; a stream sends them at the end.

    Raises:
        BadRequest: a field does not go with beam search.
        AsyncLLMError: the engine refused or failed before the first byte.
    """
    service.check_ready()
    wanted = _search_params(body, params, service.llm.default_params)
    reservation = request[RESERVATION]
    searches = [
        service.llm.start_beam_search(ids, wanted, scheduling, reservation) for ids in prompts
    ]
    # Each search takes one place, however many answers are wanted.
    reservation.expect(sum(map(len, prompts)), len(prompts))
    n = body.n or 1
    kind: type[EventStream | WholeAnswer] = EventStream if body.stream else WholeAnswer
    delivery = kind(request, reply, n * len(searches))
    most = UNSTATED_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    work = Work(sum(map(len, prompts)), most * wanted.beam_width * len(prompts))
    async with service.serve(request, delivery, (), work) as served:
        service.name(served, reply, scheduling.tenant)
        task = asyncio.create_task(_deliver(searches, n, delivery))
        try:
            return await delivery.respond()
        finally:
            task.cancel()
            await asyncio.wait([task])


def _search_params(
    body: OpenAIFields, params: SamplingParams, defaults: SamplingParams
) -> BeamSearchParams:
    if body.temperature:
        raise BadRequest("use_beam_search needs temperature 0", param="temperature")
    if body.trace:
        raise BadRequest("use_beam_search has no trace", param="trace")
    given = msgspec.structs.asdict(params)
    for name, value in given.items():
        nothing: tuple[Any, ...] = ({}, getattr(_NEUTRAL, name), getattr(defaults, name))
        if name not in _SHARED | _OF_DRAWING and value not in nothing:
            param = name if hasattr(body, name) else "use_beam_search"
            raise BadRequest(f"use_beam_search does not go with {name}", param=param)
    search: dict[str, Any] = {name: given[name] for name in _SHARED}
    for name in ("length_penalty", "early_stopping"):
        if (value := getattr(body, name)) is not None:
            search[name] = value
    try:
        return BeamSearchParams(beam_width=num_generated(body), **search)
    except BadRequest as error:
        if error.param == "beam_width":
            error.param = "n" if body.best_of is None else "best_of"
        raise


async def _deliver(searches: Sequence[Search], n: int, delivery: Delivery) -> None:
    """Run the searches concurrently; each one's beams become its choices."""

    async def search(first: int, search: Search) -> None:
        beams = await search.run()
        for j in range(n):
            delta = TokenDelta(finish_reason=FinishReason.LENGTH)  # a vocabulary of fewer tokens
            if j < len(beams):
                beam = beams[j]
                delta = TokenDelta(
                    text=beam.text,
                    token_ids=beam.token_ids,
                    logprobs=beam.logprobs,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                    cached_tokens=beam.usage.cached_tokens,
                )
            delivery.push(first + j, delta)

    try:
        async with asyncio.TaskGroup() as tasks:
            for i, one in enumerate(searches):
                tasks.create_task(search(i * n, one))
    except* Exception as errors:
        delivery.end(errors.exceptions[0])
