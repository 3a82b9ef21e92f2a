"""Embeddings: requests that generate nothing, and deliver their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.errors import BadRequest
from asyncllm.llm.generation import Submitter
from asyncllm.system.event_loop import Slices, each_later, sliced
from asyncllm.types import Prompt, SchedulingParams, is_single
from asyncllm.types.embedding import EmbeddingParams


async def embed(
    llm: Submitter,
    prompts: Prompt | Sequence[Prompt],
    params: EmbeddingParams,
    scheduling: SchedulingParams | None,
) -> np.ndarray:
    """See ``AsyncLLM.embed``."""
    params.check(llm.limits.embedding_size)
    if not is_single(prompts):
        return await _embed_all(llm, prompts, params, scheduling)
    [vector] = await _embed_all(llm, [prompts], params, scheduling)
    return np.asarray(vector)


async def _embed_all(
    llm: Submitter,
    prompts: Sequence[Any],
    params: EmbeddingParams,
    scheduling: SchedulingParams | None,
) -> np.ndarray:
    """float32 [prompts, dimensions]."""
    size = params.dimensions or llm.limits.embedding_size
    if len(prompts) == 0:
        return np.empty((0, size), dtype=np.float32)
    if len(prompts) > llm.limits.max_waiting:
        raise BadRequest(
            f"{len(prompts)} prompts are more than max_waiting, {llm.limits.max_waiting}",
            param="prompt",
        )
    tenant = scheduling.tenant if scheduling else ""
    pooled = PooledParams(pooling=params.pooling)
    collectors = [Collector() for _ in prompts]
    submitted: list[int] = []
    with llm.reserve(len(prompts), len(prompts), tenant) as reservation:
        ids = await _encode_all(llm, prompts)
        reservation.expect(sum(map(len, ids)))

        def submit(one: tuple[list[int], Collector]) -> None:
            submitted.append(llm.submit(one[0], pooled, one[1], scheduling, reservation))

        try:
            await Slices().each(zip(ids, collectors, strict=True), submit)
            deltas = await Collector.all(collectors)
        finally:
            each_later(submitted, llm.abort)
    hidden = [delta.hidden for delta in deltas if delta.hidden is not None]
    return np.stack([params.vector(state) for state in hidden])


async def _encode_all(llm: Submitter, prompts: Sequence[Any]) -> list[list[int]]:
    """Token ids of each prompt; the texts are tokenized together."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await llm.encode_all(texts) if texts else ())
    return [
        next(encoded) if isinstance(prompt, str) else await llm.encode_prompt(prompt)
        async for prompt in sliced(prompts)
    ]
