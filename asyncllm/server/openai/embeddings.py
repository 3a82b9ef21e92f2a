"""POST /v1/embeddings, and how the vectors of any route's prompts are made."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from asyncllm.engine.pooling import PooledParams
from asyncllm.errors import BadRequest
from asyncllm.server.chat.scheduling import expect_prompts
from asyncllm.server.http.answer import encode
from asyncllm.server.http.api_keys import tenant_of
from asyncllm.server.http.middleware import RESERVATION, request_id
from asyncllm.server.openai.completions import encode_prompts, split_prompts
from asyncllm.server.openai.options import check_count
from asyncllm.server.openai.prompts import check_truncation, truncate
from asyncllm.server.openai.requests import CompletionRequest, EmbeddingRequest
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.streaming.delivery import ClientDelivery, Job
from asyncllm.types.embedding import EmbeddingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from asyncllm.types import TokenDelta

#: More numbers than this are written in a thread, for all others to go on meanwhile.
LONG_ANSWER: Final = 1 << 14

#: What clients call the fields of the completion.
_NAMES: Final = {"prompt": "input", "n": "input"}
_SAME_NAME: Final = (
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
    "priority",
    "deadline_ms",
    "cache_salt",
)


async def embeddings(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await service.receive(request, EmbeddingRequest)
    model = service.resolve_model(asked.model)
    params = embedding_params(service, asked.dimensions, asked.pooling, asked.normalize)
    # The prompts are those of a completion that generates nothing.
    given = {name: getattr(asked, name) for name in _SAME_NAME}
    try:
        prompts = CompletionRequest(prompt=asked.input, max_tokens=0, **given)
        jobs = await embedding_jobs(service, request, prompts, params)
        as_text = asked.encoding_format == "base64"

        def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
            vectors = (_entry(i, params.vector(part), as_text) for i, part in enumerate(hidden))
            count = sum(len(job.prompt_ids) for job in jobs)
            usage = {
                "prompt_tokens": count,
                "total_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached_tokens},
            }
            tail = encode({"model": model, "usage": usage})[1:]
            return b'{"object":"list","data":[%b],%b' % (b",".join(vectors), tail)

        return await answer_embeddings(service, request, jobs, write)
    except BadRequest as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _entry(index: int, vector: np.ndarray, as_text: bool) -> bytes:
    """One of ``data``; each is encoded on its own, as encoding lets no other thread run."""
    values: Any = vector.tolist()
    if as_text:
        values = base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    return encode({"object": "embedding", "index": index, "embedding": values})


def embedding_params(
    service: Service,
    dimensions: int | None,
    pooling: str | None = None,
    normalize: bool | None = None,
) -> EmbeddingParams:
    """What was asked for, over the server's defaults.

    Raises:
        BadRequest: the model's vectors have fewer dimensions.
    """
    given: dict[str, Any] = {"pooling": pooling or service.config.pooling, "dimensions": dimensions}
    params = EmbeddingParams(normalize=normalize is not False, **given)
    params.check(service.llm.limits.embedding_size)
    return params


async def embedding_jobs(
    service: Service, request: web.Request, asked: CompletionRequest, params: EmbeddingParams
) -> list[Job]:
    """One for each prompt of a completion.

    Raises:
        BadRequest: there are no prompts, or too many, or one is too long.
        QueueFull: they cannot join the queue now.
    """
    llm = service.llm
    check_truncation(asked)
    scheduling = service.scheduling(request, asked)
    given = split_prompts(asked.prompt)
    check_count(len(given), asked, llm.limits.max_waiting)
    expect_prompts(llm, request[RESERVATION], given, 1)
    context = llm.limits.max_model_len
    pooled = PooledParams(pooling=params.pooling)
    return [
        Job(truncate(ids, asked, context, asked.max_tokens), pooled, scheduling)
        for ids in await encode_prompts(llm, given, asked)
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
    delivery = _Embeddings(request, len(jobs), write)
    with service.live.serve(service.llm, delivery, jobs, request[RESERVATION]) as served:
        service.log.add(tenant_of(request), (request_id.get(),), served)
        return await delivery.respond()


class _Embeddings(ClientDelivery):
    """Collects the hidden states of all prompts."""

    def __init__(
        self, request: web.Request, count: int, write: Callable[[Sequence[bytes], int], bytes]
    ):
        super().__init__(request, count)
        self._write = write
        self._hidden = [b""] * count
        self._cached_tokens = 0

    def _take(self, index: int, delta: TokenDelta) -> None:
        if delta.hidden is not None:
            self._hidden[index] = delta.hidden
        self._cached_tokens += delta.cached_tokens
        if not self._unfinished:
            self.end()
        else:
            self._client_is_gone()

    def abort(self) -> None:
        """There is no part of an answer that would be of use."""
        self.end(BadRequest("the request was aborted", code="aborted"))

    async def respond(self) -> web.StreamResponse:
        error = await self._ended
        if error is not None:
            raise error
        if sum(map(len, self._hidden)) > 4 * LONG_ANSWER:
            body = await asyncio.to_thread(self._write, self._hidden, self._cached_tokens)
        else:
            body = self._write(self._hidden, self._cached_tokens)
        return web.Response(body=body, content_type="application/json")
