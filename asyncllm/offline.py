"""LLM: a model for plain synchronous code; its event loop runs in a background thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

import numpy as np

from asyncllm.api import AsyncLLM
from asyncllm.config import EngineConfig
from asyncllm.embedding_params import EmbeddingParams, embedding_params
from asyncllm.errors import BadRequest, QueueFull
from asyncllm.loop_thread import LoopThread
from asyncllm.types import is_single

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.beam_search import Beam, BeamSearchParams
    from asyncllm.config import EngineLimits, PolicyName
    from asyncllm.engine.policy import Policy
    from asyncllm.engine.stats import EngineStats
    from asyncllm.types import Completion, Prompt, SamplingParams, SchedulingParams, TokenDelta

T = TypeVar("T")

#: How often a full queue is asked again, in seconds.
RETRY_SECONDS = 0.05


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
            policy: who is served next. Where neither it nor a ``config`` is given, those with the
                most ``max_tokens``: a batch ends sooner when its longest answers begin first.
                Without a ``config``, prompts also fill whole steps (``itl_target_ms`` 0): nobody
                watches the tokens come.

        Raises:
            BadRequest: an option has a bad value.
            ModelError: the model cannot be found or served.
        """
        if isinstance(policy, str):
            options["policy"] = policy
            policy = None
        if config is None:
            options = {"policy": "longest", "itl_target_ms": 0.0, **options}
            config = EngineConfig(model=None if model is None else str(model), **options)
        elif model is not None or options:
            raise BadRequest("give either config or model and options, not both", param="config")
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
        progress: bool = True,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: SchedulingParams | None = None,
        *,
        progress: bool = True,
    ) -> Completion | list[Completion]:
        """The answers to a list of prompts, in their order; or to one prompt.

        The first prompt that fails ends the whole call, and so does KeyboardInterrupt; what is
        unfinished is cancelled, and the model goes on serving.

        Args:
            prompts: each is text, a list of token ids, or a list of chat messages.
            params: for all prompts, or one for each; the model's own defaults when None.
            scheduling: for all prompts.
            progress: draw a progress bar while a list is worked on.

        Raises:
            BadRequest: a prompt can never be served; the message starts with its index. Or there
                are not as many params as prompts.
            DeadlineExceeded: a prompt was not answered in time.
            StepError, EngineDead: it failed while running.
        """
        if is_single(prompts):
            if isinstance(params, Sequence):
                raise BadRequest("one prompt takes one SamplingParams", param="params")
            return self._thread.run(self._llm.generate(prompts, params, scheduling))
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadRequest(f"{len(prompts)} prompts but {len(each)} params", param="params")
        return self._generate_all(cast("Sequence[Prompt]", prompts), each, scheduling, progress)

    @overload
    def beam_search(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
    ) -> list[Beam]: ...

    @overload
    def beam_search(
        self,
        prompts: Sequence[Prompt],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
    ) -> list[list[Beam]]: ...

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
        wanted = embedding_params(params, options)
        if is_single(prompts) or len(prompts) == 0:
            return self._thread.run(llm.embed(prompts, wanted, scheduling))
        each = cast("Sequence[Prompt]", prompts)
        found: dict[int, np.ndarray] = {}

        async def embed(index: int) -> None:
            with _naming(index):
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

    @property
    def limits(self) -> EngineLimits:
        """What the engine works with: context, KV cache, device."""
        return self._llm.limits

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; they change while requests run."""
        return self._llm.stats

    def close(self) -> None:
        """Fail what is unfinished with EngineDead and give all memory back. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        scheduling: SchedulingParams | None,
        progress: bool,
    ) -> list[Completion]:
        from tqdm.auto import tqdm

        llm, intake = self._llm, self._intake
        speed = Speed(llm.stats)
        answers: dict[int, Completion] = {}

        ready: dict[int, SamplingParams] = {}  # of those that differ, by identity

        async def answer(index: int) -> None:
            asked = params[index]
            with _naming(index):
                ids = await intake.encode(prompts[index])
                wanted = None if asked is None else ready[id(asked)]
                answers[index] = await llm.generate(ids, wanted, scheduling)

        async def answer_all() -> None:
            for index, asked in enumerate(params):
                if asked is not None and id(asked) not in ready:
                    with _naming(index):
                        ready[id(asked)] = await llm.prepare(asked)
            await intake.run(answer, range(len(prompts)))

        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:

            def draw() -> None:
                bar.n = len(answers)
                bar.set_postfix_str(str(speed))

            self._thread.run(answer_all(), draw)
            draw()
        return [answers[index] for index in range(len(prompts))]


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt it is that is refused."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(
            f"prompt {index}: {error.message}", param=error.param, code=error.code
        ) from error


class Speed:
    """Tokens that a model has generated since now, and how fast."""

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


class Intake:
    """How batches enter the engine's queue: in their order, as much of them as it takes.

    The queue's policy then sees them together; what does not fit waits here, and is never refused.
    """

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._places = asyncio.Semaphore(llm.limits.max_waiting)
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[T], Coroutine[Any, Any, None]], items: Iterable[T]) -> None:
        """Do ``work`` on every item, on as many at once as may be in the queue.

        The first error cancels the rest and is raised as it is, not in a group.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for item in items:
                    await self._places.acquire()
                    task = tasks.create_task(work(item))
                    task.add_done_callback(lambda _: self._places.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, when the queue has room for so many: submit them at once.

        Raises:
            BadRequest: the prompt can never be served.
        """
        ids: list[int] | None = None
        async with self._turn:
            while True:
                try:
                    with self._llm.reserve() as reservation:
                        if ids is None:
                            ids = await self._llm.encode_prompt(prompt, reservation)
                        reservation.expect(len(ids))
                    return ids
                except QueueFull:
                    await asyncio.sleep(RETRY_SECONDS)
