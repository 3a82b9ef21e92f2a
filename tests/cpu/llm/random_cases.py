"""Random requests to tiny hybrids, each checked against the same model without a cache.

``python -m tests.cpu.llm.random_cases --cases 10000`` runs many more than the test does.

A case is one request: a prompt that leaves earlier ones somewhere, goes on from an answer, or is
new; beside others, cut into chunks, preempted, aborted, or found in the cache of the device or of
the host. Its tokens, greedy or sampled, must have the logprobs that an engine gives them which
computes prompt and answer at once, alone, and from the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asyncllm import AsyncLLM, Completion, SamplingParams, SchedulingParams
from asyncllm.engine.engine import Engine
from asyncllm.executor.memory import limits
from tests.support.models import tiny_models
from tests.support.server.polling import pages_are_released
from tests.support.text import tokenizers

FAMILIES = ("qwen3_5", "lfm2", "granite_hybrid")
#: Requests to one engine; then comes another, with other options.
ROUND = 75
MOST_PROMPT = 220
TOLERANCE = 2e-4
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "page_size": 4}


class Mismatch(AssertionError):
    """An answer that depends on more than its prompt."""


class Round:
    """One engine with random options, and requests to it."""

    def __init__(self, seed: int):
        self.random = rng = random.Random(seed)
        self.kept = rng.choice([1, 4, 16])
        self.options = CPU | {
            "max_num_seqs": rng.choice([1, 2, 4, 6]),
            "max_model_len": 240,
            "prefill_chunk": rng.choice([13, 33, 64, 400]),
            "kv_cache_tokens": rng.choice([240, 400, 3000]),
            "host_kv_gib": rng.choice([0.0, 0.001, 0.02]),
            "steps_in_flight": rng.choice([1, 2, 2]),
            "itl_target_ms": rng.choice([0.0, 27.0]),
        }
        self.known: list[list[int]] = []
        self.happened: Counter[str] = Counter()

    def prompt(self) -> list[int]:
        rng = self.random
        tokens: list[int] = []
        if self.known and rng.random() < 0.8:
            tokens = list(rng.choice(self.known[-12:]))
            if rng.random() < 0.6:
                del tokens[rng.randrange(len(tokens)) :]
        length = min(rng.choice([1, 3, 20, 60, 110]), MOST_PROMPT - len(tokens))
        tokens += [4 + rng.randrange(90) for _ in range(length)]
        return tokens[:MOST_PROMPT] or [5]

    async def ask(self, llm: AsyncLLM, plain: AsyncLLM) -> None:
        rng = self.random
        prompt, count = self.prompt(), rng.randint(1, 20)
        greedy = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0,
            max_tokens=count,
            logprobs=1,
            ignore_eos=True,
            seed=7,
        )
        wanted = SchedulingParams(
            cache_ttl_s=rng.choice([None, None, 0, 5.0]), priority=rng.randint(-1, 1)
        )
        self.known.append(prompt)
        task = asyncio.ensure_future(llm.generate(prompt, params, wanted))
        if rng.random() < 0.15:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            await asyncio.sleep(rng.random() * 0.02)
            self.happened["aborted"] += task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            completion: Completion = task.result()
            self.known.append([*prompt, *completion.token_ids])
            await check(plain, prompt, completion, greedy=greedy)
            self.happened["found"] += completion.usage.cached_tokens > 0

    async def go(self, folder: Path, cases: int) -> None:
        rng = self.random
        with patch.multiple(limits, CHECKPOINTS=self.kept, LEAST_CHECKPOINTS=1):
            llm = AsyncLLM(folder, **self.options)
            await llm.__aenter__()
        try:
            async with AsyncLLM(folder, **CPU, prefix_caching=False) as plain:
                left = cases
                while left:
                    burst = min(left, rng.choice([1, 2, 5, 9]))
                    left -= burst
                    tasks = [asyncio.ensure_future(self.ask(llm, plain)) for _ in range(burst)]
                    while not all(task.done() for task in tasks):
                        await asyncio.sleep(0.004)
                        if rng.random() < 0.06:
                            self.happened["preempted"] += preempt_one(llm, rng)
                    await asyncio.gather(*tasks)
                await pages_are_released(llm)
            stats = llm.stats
            assert stats.books_healed == 0
            self.happened["used"] += stats.states_used
            self.happened["from host"] += stats.host_cached_tokens
        finally:
            await llm.__aexit__(None, None, None)


def preempt_one(llm: AsyncLLM, rng: random.Random) -> bool:
    """Have a running sequence wait again, as if pages had run out."""
    engine = llm._started.engine
    assert isinstance(engine, Engine)
    scheduler = engine._scheduler
    running = list(scheduler.batch.running.values())
    if not running or not scheduler.in_flight:
        return False
    seq = rng.choice(running)
    scheduler.departures.preempt(seq, scheduler.in_flight[-1], engine._clock())
    return True


async def check(plain: AsyncLLM, prompt: list[int], got: Completion, *, greedy: bool) -> None:
    """Compare an answer with what the model says when it sees all of it at once."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    whole = await plain.generate([*prompt, *got.token_ids], params)
    assert whole.prompt_logprobs is not None
    assert got.logprobs is not None
    for i, entry in enumerate(got.logprobs):
        expected = whole.prompt_logprobs[len(prompt) + i]
        assert expected is not None
        best = max(logprob for _, logprob in expected.top)
        if abs(entry.logprob - expected.logprob) > TOLERANCE or (
            greedy and expected.logprob < best - TOLERANCE
        ):
            raise Mismatch(
                f"token {i} of the answer to {prompt} has logprob {entry.logprob}, and alone "
                f"{expected.logprob}; the likeliest has {best}"
            )


async def run(folders: dict[str, Path], cases: int, first: int = 0) -> Counter[str]:
    """Run at least so many cases, and say what happened in them."""
    happened: Counter[str] = Counter()
    for number in range(-(-cases // ROUND)):
        family = list(folders)[number % len(folders)]
        one = Round(first + number)
        try:
            await one.go(folders[family], min(ROUND, cases))
        except BaseException:
            print(f"round {first + number} ({family}, {one.options})")
            raise
        happened += one.happened
    return happened


def main(
    said: str,
    run: Callable[[dict[str, Path], int, int], Coroutine[Any, Any, Counter[str]]],
    families: Iterable[str],
) -> None:
    """The command line of random cases: ``said`` is their description."""
    parser = argparse.ArgumentParser(description=said.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folders = {}
        for family in families:
            (folder := Path(root) / family).mkdir()
            folders[family] = tiny_models.make(family, folder)
            (folder / "tokenizer.json").write_text(tokenizers.byte_level())
        started = time.perf_counter()
        happened = asyncio.run(run(folders, args.cases, args.first))
    print(f"{args.cases} cases in {time.perf_counter() - started:.0f} s without a mismatch")
    print(", ".join(f"{what} {count}" for what, count in sorted(happened.items())))


if __name__ == "__main__":
    main(__doc__, run, FAMILIES)
