"""LLM: a model for plain synchronous code; its event loop runs in a background thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar, cast, overload

from asyncllm.api import AsyncLLM
from asyncllm.errors import BadRequest
from asyncllm.loop_thread import LoopThread

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.config import EngineConfig, EngineLimits
    from asyncllm.engine.stats import EngineStats
    from asyncllm.types import Completion, Prompt, SamplingParams, TokenDelta

T = TypeVar("T")


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
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ):
        """Load the model; takes what ``AsyncLLM`` takes.

        Raises:
            BadRequest: an option has a bad value.
            ModelError: the model cannot be found or served.
        """
        self._llm = AsyncLLM(model, config=config, progress=progress, **options)
        self._thread = LoopThread(self._llm)
        self._room = asyncio.Semaphore(outstanding(self._llm.limits))

    # A str is also a sequence of prompts; as in the code, the first signature that fits counts.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: SamplingParams | None = None, *, progress: bool = True
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> Completion | list[Completion]:
        """The answers to a list of prompts, in their order; or to one prompt.

        The first prompt that fails ends the whole call, and so does KeyboardInterrupt; what is
        unfinished is cancelled, and the model goes on serving.

        Args:
            prompts: each is text, a list of token ids, or a list of chat messages.
            params: for all prompts, or one for each; the model's own defaults when None.
            progress: draw a progress bar while a list is worked on.

        Raises:
            BadRequest: a prompt can never be served; the message starts with its index. Or there
                are not as many params as prompts.
            StepError, EngineDead: it failed while running.
        """
        if _is_single(prompts):
            if isinstance(params, Sequence):
                raise BadRequest("one prompt takes one SamplingParams", param="params")
            return self._thread.run(self._llm.generate(prompts, params))
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise BadRequest(f"{len(prompts)} prompts but {len(each)} params", param="params")
        return self._generate_all(cast("Sequence[Prompt]", prompts), each, progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[TokenDelta, None, None]:
        """The answer as it grows; the last delta has a ``finish_reason``.

        A slow reader gets several tokens at once. Closing the generator cancels the request. Raises
        like ``generate``.
        """
        return self._thread.iterate(self._llm.stream(prompt, params))

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
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], progress: bool
    ) -> list[Completion]:
        from tqdm.auto import tqdm

        llm = self._llm
        speed = Speed(llm.stats)
        answers: dict[int, Completion] = {}

        async def answer(index: int) -> None:
            try:
                answers[index] = await llm.generate(prompts[index], params[index])
            except BadRequest as error:
                raise BadRequest(
                    f"prompt {index}: {error.message}", param=error.param, code=error.code
                ) from error

        with tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar:

            def draw() -> None:
                bar.n = len(answers)
                bar.set_postfix_str(str(speed))

            self._thread.run(run_bounded(self._room, answer, range(len(prompts))), draw)
            draw()
        return [answers[index] for index in range(len(prompts))]


def _is_single(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, dict)))


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


def outstanding(limits: EngineLimits) -> int:
    """How many requests keep the engine busy without overflowing its queue."""
    return min(2 * limits.max_num_seqs, limits.max_waiting)


async def run_bounded(
    room: asyncio.Semaphore, work: Callable[[T], Coroutine[Any, Any, None]], items: Iterable[T]
) -> None:
    """Do ``work`` on every item, on as many at once as ``room`` admits.

    The first error cancels the rest and is raised as it is, not in a group.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                await room.acquire()
                tasks.create_task(work(item)).add_done_callback(lambda _: room.release())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
