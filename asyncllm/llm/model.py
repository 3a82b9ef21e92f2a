"""The part of ``AsyncLLM`` that batches and embeddings are made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncllm.config import EngineLimits
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.types import Prompt, SamplingParams, SchedulingParams, Sink


class Model(Protocol):
    """See ``AsyncLLM`` for each method."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def default_params(self) -> SamplingParams: ...

    def reserve(
        self, num_tokens: int = 1, num_requests: int = 1, tenant: str = ""
    ) -> Reservation: ...

    async def prepare(self, params: SamplingParams) -> SamplingParams: ...

    async def encode_prompt(
        self, prompt: Prompt, reservation: Reservation | None = None
    ) -> list[int]: ...

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> int: ...

    def abort(self, request_id: int) -> None: ...
