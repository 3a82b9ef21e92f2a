"""POST /api/embed and its predecessor /api/embeddings, as Ollama's clients use them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web

from asyncllm.server.http.answer import encode, encode_with, json_body, json_response
from asyncllm.server.ollama.conversion import ineffective
from asyncllm.server.ollama.models import resolve_model
from asyncllm.server.ollama.requests import OllamaEmbeddingsRequest, OllamaEmbedRequest
from asyncllm.server.ollama.schemas import OllamaEmbedded, OllamaEmbedding
from asyncllm.server.openai.embeddings import answer_embeddings, embedding_jobs, embedding_params
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.server.streaming.delivery import Job
    from asyncllm.types.embedding import EmbeddingParams


async def ollama_embed(request: web.Request) -> web.StreamResponse:
    began = time.perf_counter_ns()
    service = request.app[SERVICE]
    body = await service.receive(request, OllamaEmbedRequest)
    model = _model_of(service, body)
    params = embedding_params(service, body.dimensions)
    texts = [body.input] if isinstance(body.input, str) else body.input
    jobs = []
    if body.input and texts:
        jobs = await _jobs(service, request, texts, params, truncate=body.truncate is not False)
    submitted = time.perf_counter_ns()

    def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
        # Each vector is encoded by itself: encoding holds the GIL.
        vectors = (encode(params.vector(part).tolist()) for part in hidden)
        answer = OllamaEmbedded(
            model=model,
            embeddings=[],
            total_duration=time.perf_counter_ns() - began,
            load_duration=submitted - began,
            prompt_eval_count=sum(len(job.prompt_ids) for job in jobs),
        )
        return encode_with(answer, "embeddings", vectors)

    if not jobs:  # the request only loads the model
        return json_body(write((), 0))
    return await answer_embeddings(service, request, jobs, write)


async def ollama_embeddings(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = await service.receive(request, OllamaEmbeddingsRequest)
    _model_of(service, body)
    params = embedding_params(service, None)
    if not body.prompt:
        return json_response(OllamaEmbedding(embedding=[]))
    jobs = await _jobs(service, request, [body.prompt], params, truncate=True)

    def write(hidden: Sequence[bytes], cached_tokens: int) -> bytes:
        return encode(OllamaEmbedding(embedding=params.vector(hidden[0]).tolist()))

    return await answer_embeddings(service, request, jobs, write)


def _model_of(service: Service, body: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> str:
    """The model's name for the answer; tells the client of options without effect."""
    context = service.llm.limits.max_model_len
    service.note_ineffective(ineffective(body.options, context))
    return resolve_model(service, body.model)


async def _jobs(
    service: Service,
    request: web.Request,
    texts: Sequence[str],
    params: EmbeddingParams,
    *,
    truncate: bool,
) -> list[Job]:
    """One for each text.

    Args:
        truncate: whether to keep only the first tokens of a text that is too long.

    Raises:
        BadRequest, QueueFull: as in ``embedding_jobs``.
    """
    prompts = CompletionRequest(prompt=list(texts), max_tokens=0)
    if truncate:
        prompts.truncate_prompt_tokens, prompts.truncation_side = -1, "right"
    return await embedding_jobs(service, request, prompts, params)
