"""Ten minutes of chats on a simulated H200 with an 8B model, in less than one and without a GPU.

    python examples/simulate.py [--rate 2] [--seconds 600] [--quick]

The scheduler and the prefix cache are the real ones; the device has a clock and no model. So the
figures are what a policy, a step budget or a cache size would give, before a GPU is rented. People
come at random (a Poisson process), share one of a few system prompts, and talk for some turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

from asyncllm import AsyncLLM, SamplingParams, TokenDelta
from asyncllm.executor.sim import virtual_time
from asyncllm.system.terminal import progress_bar

SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 600
MAX_TOKENS = 400


@dataclass
class Measured:
    """Seconds, one entry a request or a token."""

    to_first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def report(self, steps: int, simulated: float, wall: float) -> None:
        tokens = len(self.to_first_token) + len(self.between_tokens)
        print(f"requests         {len(self.to_first_token):,}")
        print(f"prompt tokens    {self.prompt_tokens:,} ({self.cached_tokens:,} from the cache)")
        print(f"output tokens    {tokens:,}, {tokens / simulated:,.0f} a second")
        print(f"first token      {percentiles(self.to_first_token)}")
        print(f"between tokens   {percentiles(self.between_tokens)}")
        print(f"simulated        {simulated:,.0f} s, {steps:,} steps")
        print(f"wall             {wall:,.1f} s")


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = {p: ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}
    return ", ".join(f"p{p} {1e3 * value:.1f} ms" for p, value in at.items())


def some_tokens(rng: random.Random, mean: float, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(1 + int(rng.expovariate(1 / mean)))]


class Answer:
    """A sink that the engine calls for each token; it costs less than a task that iterates."""

    def __init__(self, measured: Measured):
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._measured = measured
        self._tokens: list[int] = []
        self.whole: asyncio.Future[list[int]] = self._loop.create_future()

    def emit(self, delta: TokenDelta) -> None:
        now, measured = self._loop.time(), self._measured
        (measured.between_tokens if self._tokens else measured.to_first_token).append(
            now - self._last
        )
        self._last = now
        self._tokens += delta.token_ids
        if delta.finish_reason is not None:
            measured.cached_tokens += delta.cached_tokens
            self.whole.set_result(self._tokens)

    def fail(self, error: Exception) -> None:
        self.whole.set_exception(error)


async def conversation(llm: AsyncLLM, system: list[int], seed: int, measured: Measured) -> None:
    rng = random.Random(seed)
    history = list(system)
    for _ in range(1 + int(rng.expovariate(1 / 2))):
        mean = 3000 if rng.random() < 0.1 else 150  # now and then somebody pastes a document
        history += some_tokens(rng, mean, llm.limits.vocab_size)
        if len(history) + MAX_TOKENS > llm.limits.max_model_len:
            return
        # Answers end by themselves, after 512 tokens on average; those of chats are shorter.
        params = SamplingParams(seed=rng.getrandbits(62), max_tokens=MAX_TOKENS)
        answer = Answer(measured)
        llm.submit(history, params, answer)
        measured.prompt_tokens += len(history)
        history += await answer.whole
        await asyncio.sleep(rng.expovariate(1 / 30))  # reading, and writing the next message


async def main(rate: float, seconds: float) -> None:
    rng = random.Random(0)
    measured = Measured()
    async with AsyncLLM(device="sim", sim_profile="h200-8b") as llm:
        loop = asyncio.get_running_loop()
        vocab_size = llm.limits.vocab_size
        systems = [
            [rng.randrange(vocab_size) for _ in range(SYSTEM_TOKENS)] for _ in range(SYSTEM_PROMPTS)
        ]
        began, wall = loop.time(), time.perf_counter()
        with progress_bar("simulated", round(seconds), "s", transient=True) as show:
            async with asyncio.TaskGroup() as people:
                while (passed := loop.time() - began) < seconds:
                    show(int(passed), "")
                    await asyncio.sleep(rng.expovariate(rate))
                    system = rng.choice(systems)
                    people.create_task(conversation(llm, system, rng.getrandbits(62), measured))
                show(round(seconds), "the last chats end")
        measured.report(llm.stats.steps, loop.time() - began, time.perf_counter() - wall)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Simulate chats on an H200.")
    parser.add_argument("--rate", type=float, default=2.0, help="people arriving per second")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long they keep coming")
    parser.add_argument("--quick", action="store_true", help="20 seconds of chats")
    args = parser.parse_args()
    virtual_time.run(main(args.rate, 20.0 if args.quick else args.seconds))
