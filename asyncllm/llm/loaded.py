"""A loaded model: an engine, of this process or in replicas, and what is around it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncllm.config import EngineLimits, SpeculativeConfig
from asyncllm.engine.drafts.drafting import drafting_of
from asyncllm.engine.engine import Engine
from asyncllm.engine.recording.record import RecordedScheduler
from asyncllm.engine.requests.history import RequestTrace
from asyncllm.engine.requests.reservations import Reservation, Reservations
from asyncllm.engine.requests.view import LiveView
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.token_constraints import is_prepared, prepare
from asyncllm.engine.vitals import Vitals
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.llm.beam_search import BeamSearch
from asyncllm.models.spec import ModelSpec
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.structured import StructuredOutput
from asyncllm.text.tokenizer import Tokenizer, bad_word_ids
from asyncllm.types import SamplingParams, SchedulingParams, Sink
from asyncllm.types.beam_search import BeamSearchParams, Search
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.wire.executor import Executor

if TYPE_CHECKING:
    from asyncllm.engine.kv_events import KVEventPublisher


class ServingEngine(Protocol):
    """What serves a model: ``OwnEngine`` or ``ReplicatedEngine``.

    Attributes:
        alive: it has not ended.
        is_ready: it takes requests now.
    """

    limits: EngineLimits
    stats: EngineStats
    reservations: Reservations

    @property
    def vitals(self) -> Vitals | None: ...
    @property
    def alive(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    async def prepare(self, params: SamplingParams) -> SamplingParams: ...
    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        *,
        reservation: Reservation | None = None,
    ) -> int: ...
    def search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ) -> Search: ...
    def abort(self, request_id: int) -> None: ...
    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None: ...
    def view(self, most: int) -> LiveView: ...
    async def stopped(self) -> str: ...
    def give_up(self, cause: str) -> None: ...
    def abandon(self) -> None:
        """What runs will never end: ``aclose`` does not wait for it."""

    async def aclose(self) -> None:
        """Fail what is unfinished with EngineDead, and give all memory back."""


class OwnEngine(Engine):
    """The engine of this process, with its executor and what makes constraints of texts."""

    def __init__(
        self,
        limits: EngineLimits,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        structured: StructuredOutput,
        lookup: SpeculativeConfig | None,
        clock: Callable[[], float],
    ):
        shared = tokenizer.first_turn if limits.num_states else lambda prompt: 0
        super().__init__(
            limits,
            executor,
            scheduler,
            tokenizer.detokenizer,
            drafting=partial(drafting_of, lookup=lookup, token_bytes=tokenizer.token_bytes),
            clock=clock,
            shared=shared,
        )
        self._executor = executor
        self._tokenizer = tokenizer
        self._structured = structured

    @property
    def is_ready(self) -> bool:
        return self.alive

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        if is_prepared(params):
            return params
        words = await bad_word_ids(self._tokenizer, params.bad_words)
        grammar = None
        if params.grammar is not None:
            grammar = await self._structured.compile(params.grammar)
        predicted: list[int] = []
        if params.prediction:
            texts = [params.prediction]
            (predicted,) = await self._tokenizer.encode_async(texts, add_special_tokens=False)
        return prepare(params, words, self.limits, grammar, predicted)

    def search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
        reservation: Reservation | None,
    ) -> BeamSearch:
        return BeamSearch(self, self._tokenizer, prompt_ids, params, scheduling, reservation)

    def abandon(self) -> None:
        self._executor.abandon()

    async def aclose(self) -> None:
        try:
            await super().aclose()
            await self._executor.close()
        finally:  # also when closing is cancelled
            self._structured.close()


class Loaded(msgspec.Struct, frozen=True):
    """All parts of a loaded model."""

    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    chat_reader: ChatReader
    default_params: SamplingParams
    default_embedding: EmbeddingParams
    engine: ServingEngine
    recorded: RecordedScheduler | None
    kv_events: KVEventPublisher | None
    startup: StartupBill

    async def aclose(self) -> None:
        gc.unfreeze()
        try:
            await self.engine.aclose()
        finally:  # also when closing is cancelled
            if self.recorded is not None:
                self.recorded.stop_recording("the engine was closed")
            if self.kv_events is not None:
                self.kv_events.close()
            self.tokenizer.close()
