"""LLM: a model for plain synchronous code; its event loop runs in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast, overload

import numpy as np

from asyncllm.config import EngineConfig, EngineLimits, PolicyName
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.policy import Policy
from asyncllm.engine.stats import EngineStats
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.llm.brief_errors import brief
from asyncllm.llm.generation import Batch, Intake, naming
from asyncllm.llm.loop_thread import LoopThread
from asyncllm.llm.options import engine_config
from asyncllm.system.terminal import is_free, progress_bar
from asyncllm.types import (
    Completion,
    Prompt,
    SamplingParams,
    SchedulingParams,
    TokenDelta,
    is_single,
)
from asyncllm.types.beam_search import Beam, BeamSearchParams
from asyncllm.types.embedding import EmbeddingParams, embedding_params
from asyncllm.types.validate import check_kind

if TYPE_CHECKING:
    import httpx2


#: Without a ``config``: a batch ends sooner so, and nobody reads along.
_BATCH: Final = {"policy": "longest", "itl_target_ms": 0.0}


class LLM:
    """A model served inside this process, for code without an event loop.

    ::

        with LLM("path/or/hub-id") as llm:
            answers = llm.generate(["Once upon a time", "Hello"], SamplingParams(max_tokens=50))
            for delta in llm.stream([{"role": "user", "content": "Hello"}]):
                print(delta.text, end="")

    It has an event loop of its own in a thread of its own, so it also works where a loop is
    running already, as in a notebook. ``close()``, leaving the ``with`` block or dropping the last
    reference gives all memory back. Methods may be called from any thread.
    """

    @brief
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        policy: Policy | PolicyName | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ):
        """Load the model; takes what ``AsyncLLM`` takes.

        Args:
            policy: which request is served next. By default, without a ``config``, the one with the
                most ``max_tokens``: a batch ends sooner when its longest answers begin first.
                Without a ``config``, prompts also fill whole steps (``itl_target_ms`` 0), as
                nobody reads along.

        Raises:
            BadRequest: an option has a bad value.
            ModelError: the model cannot be found or served.
        """
        if isinstance(policy, str):
            options["policy"] = policy
            policy = None
        config = engine_config(model, config, options, _BATCH)
        self._llm = AsyncLLM(config=config, policy=policy, progress=progress)
        self._thread = LoopThread(self._llm)
        self._intake = Intake(self._llm)

    # A str is also a sequence of prompts; as in the code, the first signature that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]: ...
    @brief
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
        *,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """The answers to a list of prompts, in their order; or to one prompt.

        The first prompt that fails ends the whole call, and so does KeyboardInterrupt; what is
        unfinished is cancelled, and the model goes on serving.

        Args:
            prompts: each is text, a list of token ids, or a list of chat messages.
            params: for all prompts, or a list with one for each; the model's own defaults when
                None. Without ``max_tokens``, a chat may fill the context; an answer to text or
                token ids ends after 256 tokens, with ``finish_reason`` "length".
            scheduling: for all prompts.
            progress: draw a progress bar on stderr while a list is worked on; by default, if that
                is a terminal in which no other bar is drawn.

        Raises:
            BadRequest: a prompt can never be served; in a list, the message starts with its index.
                Or an argument is of the wrong type.
            DeadlineExceeded: a prompt was not answered in time.
            StepError, EngineDead: it failed while running.
        """
        if is_single(prompts):
            one = check_kind("params", params, SamplingParams)
            return self._thread.run(self._llm.generate(prompts, one, scheduling))
        return self._generate_all(Batch(prompts, params, scheduling), progress)

    @overload
    def beam_search(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: BeamSearchParams, scheduling: SchedulingParams | None = None
    ) -> list[Beam]: ...
    @overload
    def beam_search(
        self,
        prompts: Sequence[Prompt],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
    ) -> list[list[Beam]]: ...
    @brief
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
    ) -> list[Beam] | list[list[Beam]]:
        """The likeliest continuations of a prompt, best first; or of each of a list of prompts.

        Raises like ``generate``.
        """
        llm, intake = self._llm, self._intake
        if is_single(prompts):
            return self._thread.run(llm.beam_search(prompts, params, scheduling))
        each = cast("Sequence[Prompt]", prompts)
        found: dict[int, list[Beam]] = {}

        async def search(index: int) -> None:
            ids = await intake.encode(each[index])
            found[index] = await llm.beam_search(ids, params, scheduling)

        self._thread.run(intake.run(search, range(len(each))))
        return [found[index] for index in range(len(each))]

    @brief
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: EmbeddingParams | None = None,
        scheduling: SchedulingParams | None = None,
        **options: Any,
    ) -> np.ndarray:
        """The vector of a prompt, float32 [dimensions]; of a list, [prompts, dimensions].

        Takes what ``AsyncLLM.embed`` takes, and raises like ``generate``.
        """
        llm, intake = self._llm, self._intake
        wanted = embedding_params(params, options, llm.default_embedding)
        if is_single(prompts) or len(prompts) == 0:
            return self._thread.run(llm.embed(prompts, wanted, scheduling))
        each = cast("Sequence[Prompt]", prompts)
        found: dict[int, np.ndarray] = {}

        async def embed(index: int) -> None:
            with naming(index):
                ids = await intake.encode(each[index])
                [found[index]] = await llm.embed([ids], wanted, scheduling)

        self._thread.run(intake.run(embed, range(len(each))))
        return np.stack([found[index] for index in range(len(each))])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Generator[TokenDelta, None, None]:
        """The answer as it grows; the last delta has a ``finish_reason``.

        A slow reader gets several tokens at once. Closing the generator cancels the request. Raises
        like ``generate``.
        """
        return self._thread.iterate(self._llm.stream(prompt, params, scheduling))

    def httpx_client(self, server: ServerConfig | None = None) -> httpx2.Client:
        """A client of the HTTP API without a socket: ``OpenAI(http_client=...)`` takes it.

        It may be used in any thread, also after this object was dropped. ``client.close()`` ends
        its requests.
        """
        from asyncllm.server.embedded.exchange import InProcess
        from asyncllm.server.embedded.httpx_transport import client

        return client(InProcess(self._llm, self._llm.checked(server)), self._thread)

    @property
    def limits(self) -> EngineLimits:
        """What the engine works with: context, KV cache, device."""
        return self._llm.limits

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; they change while requests run."""
        return self._llm.stats

    @brief
    def close(self) -> None:
        """Fail what is unfinished with EngineDead and give all memory back. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate_all(self, batch: Batch, progress: bool | None) -> list[Completion]:
        speed, shown = Speed(self._llm.stats), is_free() if progress is None else progress
        with progress_bar("", len(batch), "prompts", shown=shown) as show:

            def draw() -> None:
                show(len(batch.answers), str(speed))

            answers = self._thread.run(batch.run(self._llm, self._intake), draw)
            draw()
        return answers


class Speed:
    """Tokens that a model generates from now on, and how fast."""

    def __init__(self, stats: EngineStats):
        self._stats = stats
        self._first = stats.generation_tokens
        self._started = time.perf_counter()

    @property
    def tokens(self) -> int:
        return self._stats.generation_tokens - self._first

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def __str__(self) -> str:
        return f"{self.tokens / self.seconds:,.0f} tok/s"
