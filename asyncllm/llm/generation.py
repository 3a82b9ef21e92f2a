"""Whole answers and embeddings of one prompt or a batch, for AsyncLLM, LLM and the command line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import BadRequest, QueueFull
from asyncllm.server.model import Model
from asyncllm.system.event_loop import SLICE_SECONDS, Slices, each_later, sliced
from asyncllm.types import Completion, Prompt, SamplingParams, SchedulingParams, Usage, is_single
from asyncllm.types.embedding import EmbeddingParams
from asyncllm.types.sampling_defaults import bounded
from asyncllm.types.validate import check_kind

T = TypeVar("T")
#: Seconds between two attempts to enter a full queue.
RETRY_SECONDS: Final = 0.05
#: At most so many items of a list begin, or are cancelled, in one turn of the event loop.
MOST_AT_ONCE: Final = 32


class Submitter(Model, Protocol):
    """``AsyncLLM``, as batches and embeddings use it."""

    async def encode_prompt(
        self, prompt: Prompt, reservation: Reservation | None = None
    ) -> list[int]: ...


def tenant_of(scheduling: SchedulingParams | None) -> str:
    """The tenant, "" for none; raises BadRequest if ``scheduling`` has another type."""
    checked = check_kind("scheduling", scheduling, SchedulingParams)
    return "" if checked is None else checked.tenant


async def read_request(
    llm: Submitter, prompt: Prompt, params: object, reservation: Reservation
) -> tuple[list[int], SamplingParams]:
    """Token ids and parameters of one request, to be submitted at once.

    Raises:
        BadRequest, QueueFull: as ``AsyncLLM.generate``.
    """
    given = check_kind("params", params, SamplingParams)
    ready = await llm.prepare(given or llm.default_params)
    ids = await llm.encode_prompt(prompt, reservation)
    return ids, bounded(ready, prompt, len(ids), llm.limits.max_model_len)


async def collect(
    llm: Submitter,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    scheduling: SchedulingParams | None,
    reservation: Reservation | None = None,
) -> Completion:
    """Submit one request and wait for its whole answer; cancelling this cancels the request."""
    collector = Collector()
    request_id = llm.submit(prompt_ids, params, collector, scheduling, reservation)
    try:
        whole = await collector.whole()
    finally:
        llm.abort(request_id)
    assert whole.finish_reason is not None, "a collector ends with the last delta"
    return Completion(
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        logprobs=whole.logprobs,
        usage=Usage(len(prompt_ids), len(whole.token_ids), whole.cached_tokens),
        prompt_logprobs=whole.prompt_logprobs,
    )


class Intake:
    """Lets batches into the engine's queue, in order and as far as there is room.

    What does not fit waits here instead of being refused. However long a batch is, the event loop
    does other work in between.
    """

    def __init__(self, llm: Submitter):
        self._llm = llm
        self._places = asyncio.Semaphore(llm.limits.max_waiting)
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[T], Coroutine[Any, Any, None]], items: Iterable[T]) -> None:
        """Do ``work`` on every item, on at most ``max_waiting`` at once.

        The first error cancels the rest and is raised.
        """
        tasks: set[asyncio.Task[None]] = set()
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = asyncio.create_task(coroutine)
            tasks.add(task)
            task.add_done_callback(ended)
            return task

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if outcome.done():
                return
            if error is not None:
                outcome.set_exception(error)
            elif not tasks:
                outcome.set_result(None)

        async def begin_all() -> None:
            at_once = left = 1
            for item in items:
                await self._places.acquire()
                begin(work(item)).add_done_callback(lambda _: self._places.release())
                left -= 1
                if left == 0:
                    began = time.perf_counter()
                    await asyncio.sleep(0)  # those that were begun do what they can do now
                    is_short = time.perf_counter() - began < SLICE_SECONDS
                    at_once = min(2 * at_once, MOST_AT_ONCE) if is_short else at_once // 2 or 1
                    left = at_once

        begin(begin_all())
        try:
            await outcome
        finally:
            await _cancelled(tasks)

    async def encode(self, prompt: Prompt, tenant: str = "") -> list[int]:
        """Wait until the queue has room for a prompt; its token ids, to be submitted at once.

        Raises:
            BadRequest: the prompt can never be served.
        """
        ids: list[int] | None = None
        async with self._turn:
            while True:
                try:
                    with self._llm.reserve(tenant=tenant) as reservation:
                        if ids is None:
                            ids = await self._llm.encode_prompt(prompt, reservation)
                        reservation.expect(len(ids))
                    return ids
                except QueueFull:
                    await asyncio.sleep(RETRY_SECONDS)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Completion:
        """``AsyncLLM.generate`` for one prompt, as soon as the queue has room for it."""
        llm = self._llm
        ready = await llm.prepare(params or llm.default_params)
        ids = await self.encode(prompt, tenant_of(scheduling))
        ready = bounded(ready, prompt, len(ids), llm.limits.max_model_len)
        return await collect(llm, ids, ready, scheduling)


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel the tasks, which leave the set as they end, and wait until all have ended."""
    left = list(tasks)
    try:
        while left:
            for task in left[-MOST_AT_ONCE:]:
                task.cancel()
            del left[-MOST_AT_ONCE:]
            await asyncio.sleep(0)
    finally:
        for task in left:  # whoever waits here is cancelled once more
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class Batch:
    """Prompts to be answered together.

    Attributes:
        answers: those finished so far, by the index of the prompt.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        scheduling: SchedulingParams | None,
    ):
        """Check the arguments of a call.

        Raises:
            BadRequest: an argument is of the wrong type, or params are not as many as prompts.
        """
        self.answers: dict[int, Completion] = {}
        self._prompts: list[Prompt] = list(prompts)
        self._scheduling = scheduling
        check_kind("scheduling", scheduling, SchedulingParams)
        if isinstance(params, Sequence):
            self._params = [
                check_kind(f"params[{i}]", each, SamplingParams) for i, each in enumerate(params)
            ]
        else:
            self._params = [check_kind("params", params, SamplingParams)] * len(self._prompts)
        if len(self._params) != len(self._prompts):
            raise BadRequest(
                f"{len(self._prompts)} prompts but {len(self._params)} params", param="params"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    async def run(self, llm: Submitter, intake: Intake) -> list[Completion]:
        """The answers in the order of the prompts; the first error cancels what is unfinished.

        Raises:
            BadRequest: a prompt can never be served; the message starts with its index.
            DeadlineExceeded, StepError, EngineDead: as ``AsyncLLM.generate``.
        """
        ready: dict[int, SamplingParams] = {}  # of those that differ, by identity
        async for index, params in sliced(enumerate(self._params)):
            if params is not None and id(params) not in ready:
                with naming(index):
                    ready[id(params)] = await llm.prepare(params)

        async def answer(index: int) -> None:
            params = self._params[index]
            with naming(index):
                self.answers[index] = await intake.generate(
                    self._prompts[index],
                    None if params is None else ready[id(params)],
                    self._scheduling,
                )

        await intake.run(answer, range(len(self._prompts)))
        return [self.answers[index] for index in range(len(self._prompts))]


@contextmanager
def naming(index: int) -> Iterator[None]:
    """Add the index of a refused prompt to the error."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(
            f"prompt {index}: {error.message}", param=error.param, code=error.code
        ) from error


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
