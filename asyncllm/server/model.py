"""What the server needs of the model that it serves; ``AsyncLLM`` has it, and so may a test's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.config import EngineConfig, EngineLimits
    from asyncllm.engine.requests.history import RequestTrace
    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.engine.requests.view import LiveView
    from asyncllm.engine.stats import EngineStats
    from asyncllm.engine.vitals import Vitals
    from asyncllm.executor.startup_bill import StartupBill
    from asyncllm.text.chat_reader import ChatReader
    from asyncllm.types import SamplingParams, SchedulingParams, Sink
    from asyncllm.types.beam_search import BeamSearchParams, Search
    from asyncllm.types.embedding import EmbeddingParams


class Tokenizer(Protocol):
    """As ``asyncllm.text.tokenizer.Tokenizer``."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def min_tokens(self, num_bytes: int) -> int: ...


class Architecture(Protocol):
    """As ``asyncllm.models.spec.ModelSpec``."""

    @property
    def architecture(self) -> str: ...

    @property
    def weight_format(self) -> str | None: ...


class Model(Protocol):
    """As ``asyncllm.AsyncLLM``, which says what each of these does and raises."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def created(self) -> int: ...

    @property
    def model_name(self) -> str: ...

    @property
    def ready(self) -> bool: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def spec(self) -> Architecture: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> object | None: ...

    @property
    def chat_reader(self) -> ChatReader: ...

    @property
    def default_params(self) -> SamplingParams: ...

    @property
    def default_embedding(self) -> EmbeddingParams: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def startup(self) -> StartupBill: ...

    @property
    def num_reserved(self) -> int: ...

    @property
    def vitals(self) -> Vitals | None: ...

    async def start(self) -> object: ...

    async def stopped(self) -> str: ...

    def give_up(self, cause: str) -> None: ...

    async def aclose(self) -> None: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_all(
        self, texts: list[str], *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[list[int]]: ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        reservation: Reservation | None = None,
        /,
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        any_length: bool,
        **template_kwargs: Any,
    ) -> list[int]: ...

    async def prepare(self, params: SamplingParams) -> SamplingParams: ...

    def reserve(
        self, num_tokens: int = 1, num_requests: int = 1, tenant: str = ""
    ) -> Reservation: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> int: ...

    def start_beam_search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> Search: ...

    def abort(self, request_id: int) -> None: ...

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None: ...

    def view(self, most: int = 64) -> LiveView: ...
