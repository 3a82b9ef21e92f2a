"""POST /v1/embeddings, and what all routes for embeddings share."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from asyncllm.engine.pooling import PooledParams
from asyncllm.errors import BadRequest
from asyncllm.server.chat.prompts import encode_prompts, expect_prompts, split_prompts, truncate
from asyncllm.server.http.answer import encode, encode_with
from asyncllm.server.http.middleware import RESERVATION, request_id
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.openai import schemas
from asyncllm.server.openai.requests import CompletionRequest, EmbeddingRequest, check_options
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.streaming.delivery import Job, WholeAnswer
from asyncllm.server.trace import Trace
from asyncllm.types import TokenDelta
from asyncllm.types.embedding import EmbeddingParams

#: From the fields of a completion to this route's.
_NAMES: Final = {"prompt": "input", "n": "input"}
_SAME_NAME: Final = tuple(
    name
    for name in EmbeddingRequest.__struct_fields__
    if name in CompletionRequest.__struct_fields__
)


async def embeddings(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, EmbeddingRequest)
    model = service.resolve_model(body.model)
    params = embedding_params(service, body.dimensions, body.pooling, body.normalize)
    # The prompts are those of a completion that generates nothing.
    given = {name: getattr(body, name) for name in _SAME_NAME}
    try:
        prompts = CompletionRequest(prompt=body.input, max_tokens=0, **given)
        jobs = await embedding_jobs(service, request, prompts, params)
        as_text = body.encoding_format == "base64"

        def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
            vectors = (_entry(i, params.vector(part), as_text) for i, part in enumerate(hidden))
            count = sum(len(job.prompt_ids) for job in jobs)
            usage = schemas.EmbeddingUsage(
                prompt_tokens=count,
                total_tokens=count,
                prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=cached_tokens),
            )
            return encode_with(
                schemas.EmbeddingList(data=[], model=model, usage=usage), "data", vectors
            )

        return await answer_embeddings(service, request, jobs, write)
    except BadRequest as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _entry(index: int, vector: np.ndarray, as_text: bool) -> bytes:
    """One entry of ``data``, encoded by itself: encoding holds the GIL."""
    values: Any = vector.tolist()
    if as_text:
        values = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return encode(schemas.EmbeddingData(index=index, embedding=values))


def embedding_params(
    service: Service,
    dimensions: int | None,
    pooling: str | None = None,
    normalize: bool | None = None,
) -> EmbeddingParams:
    """The request's parameters, over the server's defaults.

    Raises:
        BadRequest: the model's vectors have fewer dimensions.
    """
    given = {
        "pooling": pooling or service.config.pooling,
        "normalize": normalize,
        "dimensions": dimensions,
    }
    named = {name: value for name, value in given.items() if value is not None}
    params = msgspec.structs.replace(service.llm.default_embedding, **named)
    params.check(service.llm.limits.embedding_size)
    return params


async def embedding_jobs(
    service: Service, request: web.Request, body: CompletionRequest, params: EmbeddingParams
) -> list[Job]:
    """One for each prompt of a completion.

    Raises:
        BadRequest: there are no prompts, or too many, or one is too long.
        QueueFull: they cannot join the queue now.
    """
    llm = service.llm
    given = split_prompts(body.prompt)
    check_options(body, len(given), llm.limits.max_waiting)
    scheduling = service.scheduling(request, body)
    expect_prompts(llm, request[RESERVATION], given, 1)
    context = llm.limits.max_model_len
    pooled = PooledParams(pooling=params.pooling)
    return [
        Job(truncate(ids, body, context, body.max_tokens), pooled, scheduling)
        for ids in await encode_prompts(llm, given, body)
    ]


async def answer_embeddings(
    service: Service,
    request: web.Request,
    jobs: Sequence[Job],
    write: Callable[[Sequence[bytes], int], bytes],
) -> web.StreamResponse:
    """Run the jobs and answer the request; the client's disconnection ends them.

    Args:
        write: from pooled hidden states, and the number of cached tokens, to the body.

    Raises:
        AsyncLLMError: the engine refused or failed.
    """
    service.check_ready()  # again: reading and encoding the prompts took a while
    delivery = WholeAnswer(request, _Vectors(write), len(jobs))
    async with service.serve(request, delivery, jobs) as served:
        service.log.add(tenant_of(request), (request_id.get(),), served)
        return await delivery.respond()


class _Vectors:
    """Writes the pooled hidden states of all prompts."""

    explain: Callable[[], Trace] | None = None

    def __init__(self, write: Callable[[Sequence[bytes], int], bytes]):
        self._write = write

    def body(self, outputs: list[TokenDelta]) -> bytes:
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        if len(hidden) < len(outputs):  # a part of the vectors would be of no use
            raise BadRequest("the request was aborted", code="aborted")
        return self._write(hidden, sum(output.cached_tokens for output in outputs))
