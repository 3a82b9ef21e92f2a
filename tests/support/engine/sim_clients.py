"""Clients of the simulated H200, on a virtual clock: they send requests and note what happens."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from asyncllm import AsyncLLM, SamplingParams, TokenDelta
from asyncllm.engine.policy import Policy
from asyncllm.engine.requests.history import RequestTrace
from asyncllm.executor.sim import virtual_time
from asyncllm.types import SchedulingParams
from tests.support.engine.sim_driver import COST

T = TypeVar("T")


class Sent:
    """A request and its outcome: the sink of its own tokens, and what a policy ranks.

    Attributes:
        times: the loop's time at each token, seconds.
        ended: the loop's time at the last token or at the error.
        trace: what the engine says of it, as the last token came.
    """

    def __init__(
        self, llm: AsyncLLM, prompt: list[int], max_tokens: int, scheduling: SchedulingParams
    ):
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.id = -1
        self.prompt = prompt
        self.num_prompt = len(prompt)
        self.max_length = len(prompt) + max_tokens
        self.prefill_seconds = work(len(prompt), 0)
        self.arrival = self._loop.time()
        self.priority = scheduling.priority
        self.tenant = scheduling.tenant
        timeout = scheduling.deadline_ms
        self.deadline = math.inf if timeout is None else self.arrival + timeout / 1000
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.cached = 0
        self.error: Exception | None = None
        self.ended = math.inf
        self.trace: RequestTrace | None = None

    def emit(self, delta: TokenDelta) -> None:
        self.times.append(self._loop.time())
        self.tokens += delta.token_ids
        if delta.finish_reason is not None:
            self.cached = delta.cached_tokens
            self.ended = self._loop.time()
            self.trace = self._llm.trace(self.id)
            self._over.set()

    def fail(self, error: Exception) -> None:
        self.error, self.ended = error, self._loop.time()
        self._over.set()

    async def over(self) -> None:
        await self._over.wait()

    @property
    def started(self) -> float:
        """When it was admitted for the first time."""
        assert self.trace is not None
        assert self.trace.started is not None
        return self.trace.started

    @property
    def wait(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.times[0] - self.arrival

    @property
    def work(self) -> float:
        return work(self.num_prompt, self.max_length - self.num_prompt)

    def served(self, since: float, until: float) -> float:
        """What it cost from then to then: its prompt, when computed, and each token doubly."""
        prompt = self.num_prompt if self.times and since <= self.times[0] < until else 0
        return prompt + 2 * sum(since <= time < until for time in self.times)


class Clients:
    """Sends requests to one engine. A prompt given as a length begins like no other."""

    def __init__(self, llm: AsyncLLM):
        self.llm = llm
        self.rng = random.Random(0)
        self._tokens = np.random.default_rng(0)  # a hundred times as fast for long prompts
        self.sent: list[Sent] = []
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._loop.time() - self.began

    async def sleep_until(self, time: float) -> None:
        """``time`` in seconds since the beginning."""
        await asyncio.sleep(time - self.now)

    def prompt(self, length: int) -> list[int]:
        tokens: list[int] = self._tokens.integers(5, 2000, length).tolist()
        return tokens

    def send(
        self,
        prompt: int | list[int],
        max_tokens: int,
        *,
        stop_token_ids: tuple[int, ...] = (),
        **scheduling: Any,
    ) -> Sent:
        """Queue a request, which will generate ``max_tokens``. Raises as ``AsyncLLM.submit``.

        With ``stop_token_ids``, the engine cannot know how many it will be.
        """
        ids = self.prompt(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(
            seed=len(self.sent),
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=stop_token_ids,
        )
        asked = SchedulingParams(**scheduling)
        sent = Sent(self.llm, ids, max_tokens, asked)
        sent.id = self.llm.submit(ids, params, sent, asked)
        self.sent.append(sent)
        return sent

    async def over(self, sent: Iterable[Sent] | None = None) -> None:
        """All that was sent, or these requests, are over."""
        for request in self.sent if sent is None else sent:
            await request.over()

    def abort_all(self) -> None:
        for request in self.sent:
            self.llm.abort(request.id)


def simulate(
    scenario: Callable[[Clients], Awaitable[T]], policy: Policy | None = None, **options: Any
) -> T:
    """Play a scenario against an idle H200 with an 8B model; everything must come back."""

    async def main() -> T:
        async with AsyncLLM(device="sim", sim_profile="h200-8b", policy=policy, **options) as llm:
            result = await scenario(Clients(llm))
            await asyncio.sleep(1.0)  # for steps and copies that are still under way
            assert llm.stats.running == llm.stats.waiting == llm.stats.pages_held == 0
            return result

    return virtual_time.run(main())


def work(num_prompt: int, num_output: int, num_rows: int = 256) -> float:
    """Seconds of the machine that a request takes if ``num_rows`` decode together."""
    starts = np.full(num_rows, num_prompt + num_output // 2, dtype=np.int64)
    step = COST.seconds(starts, np.ones(num_rows, dtype=np.int64), num_rows)
    pairs = num_prompt**2 / 2
    prefill = num_prompt * COST.token_seconds + pairs * COST.pair_seconds
    return prefill + num_output * step / num_rows
