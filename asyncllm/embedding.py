"""Embeddings: prompts as vectors, made of the model's final hidden states."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncllm.engine.pooling import PooledParams
from asyncllm.errors import BadRequest, StepError
from asyncllm.types import Pooling, TokenDelta, is_single
from asyncllm.validate import check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.api import AsyncLLM
    from asyncllm.types import Prompt, SchedulingParams


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states, those after the last norm, become a vector.

    Attributes:
        pooling: ``last`` takes the last token's; ``mean`` the mean of all tokens', and then nothing
            of the prompt is taken from the prefix cache.
        normalize: scale the vector to length 1.
        dimensions: keep so many of its first elements, before that; None keeps all. It makes sense
            for models that are trained for it (Kusupati et al., Matryoshka, NeurIPS 2022).

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.dimensions is not None and self.dimensions < 1:
            raise BadRequest("dimensions must be at least 1", param="dimensions")

    def check(self, size: int) -> None:
        """Whether vectors of a model whose hidden states have ``size`` elements can be so.

        Raises:
            BadRequest: they have fewer ``dimensions``.
        """
        if self.dimensions is not None and self.dimensions > size:
            raise BadRequest(
                f"dimensions must be at most {size}, the size of the model's hidden states",
                param="dimensions",
            )

    def vector(self, hidden: bytes) -> npt.NDArray[np.float32]:
        """float32 [dimensions], of a pooled hidden state as ``TokenDelta`` has it.

        Raises:
            StepError: it is not finite.
        """
        vector = np.frombuffer(hidden, dtype="<f4")[: self.dimensions]
        if not np.isfinite(vector).all():
            raise StepError("the model's hidden states were not finite")
        # In float64: the squares of float32 may be too large for it.
        length = np.linalg.norm(vector.astype(np.float64)) if self.normalize else 1.0
        scaled: np.ndarray = (vector / length if length > 0 else vector).astype(np.float32)
        return scaled


def embedding_params(params: EmbeddingParams | None, options: dict[str, Any]) -> EmbeddingParams:
    """Whichever is given; raises BadRequest when both are, or an option is none."""
    if params is not None and options:
        raise BadRequest("give either params or options, not both", param="params")
    try:
        return params or EmbeddingParams(**options)
    except TypeError as error:
        raise BadRequest(str(error), param="params") from None


async def embed(
    llm: AsyncLLM,
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
    llm: AsyncLLM,
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
    llm.check_room(len(prompts), len(prompts), tenant)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await llm.encode_all(texts) if texts else ())
    ids = [
        next(encoded) if isinstance(prompt, str) else await llm.encode_prompt(prompt, tenant)
        for prompt in prompts
    ]
    llm.check_room(sum(map(len, ids)), len(ids), tenant)
    pooled = PooledParams(pooling=params.pooling)
    states = _HiddenStates(len(ids))
    submitted: list[int] = []
    try:
        for index, prompt_ids in enumerate(ids):
            submitted.append(llm.submit(prompt_ids, pooled, _Sink(states, index), scheduling))
        found = await states.all
    finally:
        for request_id in submitted:
            llm.abort(request_id)
    return np.stack([params.vector(hidden) for hidden in found])


class _HiddenStates:
    """Of some prompts, as they come; ``all`` has them at their end, or raises the first error."""

    def __init__(self, count: int):
        self.all: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._found = [b""] * count
        self._missing = count

    def take(self, index: int, delta: TokenDelta) -> None:
        if delta.hidden is not None:
            self._found[index] = delta.hidden
        self._missing -= delta.finish_reason is not None
        if not self._missing and not self.all.done():
            self.all.set_result(self._found)

    def fail(self, error: Exception) -> None:
        if not self.all.done():
            self.all.set_exception(error)


class _Sink:
    """The Sink of one prompt."""

    def __init__(self, states: _HiddenStates, index: int):
        self._states = states
        self._index = index

    def emit(self, delta: TokenDelta) -> None:
        self._states.take(self._index, delta)

    def fail(self, error: Exception) -> None:
        self._states.fail(error)


__all__ = ["EmbeddingParams", "embed", "embedding_params"]
