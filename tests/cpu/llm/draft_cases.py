"""Random requests with drafts, each checked against its answer without.

``python -m tests.cpu.llm.draft_cases --cases 10000`` runs many more than the test does.

A case is one request with random parameters: penalties, grammars, logprobs, stop strings,
``min_tokens`` and so on, greedy or with a seed, alone or as one of several answers to a prompt.
First it is asked without drafts, then beside others, cut into chunks, preempted, found in the cache
or aborted, with drafts that are right, changed or random, and with real ones: lookup, predictions
and grammars. All drafts are tried, whether they pay or not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncllm import AsyncLLM, SamplingParams, SchedulingParams
from asyncllm.text.grammar import Choice, JsonSchema, Regex
from asyncllm.types import Completion
from tests.cpu.llm.random_cases import CPU, Mismatch, main, preempt_one
from tests.support.engine.drafting import draft_answers
from tests.support.server.polling import pages_are_released

FAMILIES = ("qwen3", "gemma3", "gpt_oss", "qwen3_5")
#: Requests to one engine; then comes another, with other options.
ROUND = 100
MOST_PROMPT, MOST_OUTPUT, LENGTH = 150, 40, 200
TOLERANCE = 2e-4
GRAMMARS: tuple[Any, ...] = (
    Regex(r"[a-z ]{5,30}"),
    Regex(r"(the cat|the car) (is|was) (red|ready)"),
    Choice(("yes, of course", "yes, perhaps", "no")),
    JsonSchema(
        {
            "type": "object",
            "properties": {"a quite long name": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a quite long name", "b"],
            "additionalProperties": False,
        }
    ),
)
#: Parameters, each for some of the requests.
TRAITS: dict[str, Any] = {
    "logprobs": lambda rng: {"logprobs": rng.choice([0, 1, 3])},
    "presence": lambda rng: {"presence_penalty": rng.choice([-1.0, 0.5, 2.0])},
    "frequency": lambda rng: {"frequency_penalty": rng.choice([0.3, 1.0])},
    "repetition": lambda rng: {"repetition_penalty": rng.choice([0.8, 1.3, 2.0])},
    "filters": lambda rng: {"top_p": 0.8, "top_k": rng.choice([0, 5, 200]), "min_p": 0.001},
    "bias": lambda rng: {"logit_bias": {rng.randrange(4, 300): rng.choice([-100.0, 3.0, 8.0])}},
    "allowed": lambda rng: {"allowed_token_ids": tuple(rng.sample(range(4, 380), 40))},
    "bad words": lambda rng: {"bad_words": ("e", "the", (rng.randrange(4, 300), 7))},
    "stop": lambda rng: {"stop": tuple(rng.sample(("e", "an", "on", ".", "x", "1"), 2))},
    "stop shown": lambda rng: {"stop": "t", "include_stop_str_in_output": True},
    "stop ids": lambda rng: {"stop_token_ids": tuple(rng.sample(range(4, 380), 25))},
    "min tokens": lambda rng: {"min_tokens": rng.choice([1, 3, 12, 1000])},
    "no end": lambda rng: {"ignore_eos": True},
    "prompt logprobs": lambda rng: {"prompt_logprobs": rng.choice([0, 2])},
    "grammar": lambda rng: {"grammar": rng.choice(GRAMMARS)},
}
#: What does not go together: a grammar decides about its end, and may leave no token of a list.
APART = ("allowed", "bad words", "bias", "stop ids")


class Round:
    """Two engines with random options, one of which drafts, and the same requests to both."""

    def __init__(self, seed: int):
        self.random = rng = random.Random(seed)
        #: For what depends on time: the requests of a round are always the same.
        self.disturbing = random.Random(seed)
        lookup = {
            "method": "ngram",
            "num_speculative_tokens": rng.choice([1, 3, 5, 8]),
            "prompt_lookup_min": rng.choice([1, 2, 3]),
        }
        self.options = CPU | {
            "max_num_seqs": rng.choice([9, 12]),
            "max_model_len": LENGTH,
            "max_num_batched_tokens": rng.choice([16, 60, 512]),
            "prefill_chunk": rng.choice([13, 33, 400]),
            "kv_cache_tokens": rng.choice([LENGTH, 400, 3000]),
            "host_kv_gib": rng.choice([0.0, 0.0, 0.001]),
            "steps_in_flight": rng.choice([1, 2, 2]),
            "itl_target_ms": rng.choice([0.0, 27.0]),
            "speculative_config": lookup,
        }
        self.known: list[list[int]] = []
        self.answers: dict[int, list[int]] = {}
        self.happened: Counter[str] = Counter()

    def requests(self, count: int) -> list[tuple[list[int], SamplingParams]]:
        """Some of them have the same prompt, as the answers to one with ``n`` have."""
        found: list[tuple[list[int], SamplingParams]] = []
        while len(found) < count:
            prompt, rng = self.prompt(), self.random
            fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.0])}
            chosen = {name for name in TRAITS if rng.random() < 0.18}
            if not chosen.isdisjoint(APART):
                chosen.discard("grammar")
            for name in sorted(chosen):
                fields |= TRAITS[name](rng)
            self.happened.update(chosen)
            most = fields["max_tokens"] = rng.randint(1, MOST_OUTPUT)
            fields["min_tokens"] = min(fields.get("min_tokens", 0), most)
            for _ in range(min(rng.choice([1, 1, 1, 3]), count - len(found))):
                seed = len(self.answers) + len(found)
                found.append((prompt, SamplingParams(seed=seed, **fields)))
        return found

    def prompt(self) -> list[int]:
        rng = self.random
        tokens: list[int] = []
        if self.known and rng.random() < 0.6:
            tokens = list(rng.choice(self.known[-12:]))
            if rng.random() < 0.5:
                del tokens[rng.randrange(len(tokens)) :]
        some = [rng.randrange(4, 300) for _ in range(rng.choice([1, 3, 12]))]
        tokens += some * rng.choice([1, 1, 2, 6])
        return tokens[:MOST_PROMPT]

    async def go(self, folder: Path, cases: int) -> None:
        rng = self.random
        plain_options = CPU | {"prefix_caching": False, "max_model_len": LENGTH}
        async with (
            AsyncLLM(folder, **plain_options) as plain,
            AsyncLLM(folder, **self.options) as llm,
        ):
            with pytest.MonkeyPatch.context() as patch:
                counts = self.draft_all(llm, patch)
                while cases:
                    asked = self.requests(min(cases, rng.choice([1, 2, 4, 8])))
                    cases -= len(asked)
                    await self.ask(llm, plain, asked)
                await pages_are_released(llm)
            assert llm.stats.books_healed == 0
            self.happened["drafts"] += len(counts)
            self.happened["right"] += sum(counts)
            for kind, count in llm.stats.drafted.items():
                self.happened[f"drafted by {kind}"] += count

    def draft_all(self, llm: AsyncLLM, patch: pytest.MonkeyPatch) -> list[int]:
        """Have answers drafted, with changes, or what the engine itself would draft."""
        engine: Any = llm._started.engine
        own = engine._drafting
        counts = draft_answers(engine, self.answers, patch, seed=self.random.randrange(2**30))
        mutated = engine._drafting

        def drafting(num_prompt: int, params: SamplingParams) -> Any:
            return self.disturbing.choice((own, mutated, mutated))(num_prompt, params)

        patch.setattr(engine, "_drafting", drafting)
        return counts

    async def ask(
        self, llm: AsyncLLM, plain: AsyncLLM, asked: list[tuple[list[int], SamplingParams]]
    ) -> None:
        """Ask without drafts, then with."""
        rng = self.disturbing
        wanted = await asyncio.gather(*(plain.generate(*request) for request in asked))
        for (prompt, params), answer in zip(asked, wanted, strict=True):
            assert params.seed is not None
            self.answers[params.seed] = answer.token_ids
            self.known.append([*prompt, *answer.token_ids][:MOST_PROMPT])
        tasks = [
            asyncio.ensure_future(self.again(llm, *request, answer.text))
            for request, answer in zip(asked, wanted, strict=True)
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.003)
            if rng.random() < 0.06:
                self.happened["preempted"] += preempt_one(llm, rng)
            if rng.random() < 0.04:
                self.happened["aborted"] += rng.choice(tasks).cancel()
        await asyncio.wait(tasks)
        for request, answer, task in zip(asked, wanted, tasks, strict=True):
            if not task.cancelled():
                if is_at_border(request[1], task.result(), answer):
                    self.happened["borders"] += 1
                    continue
                check(request, task.result(), answer)
                self.happened["found"] += task.result().usage.cached_tokens > 0
                self.happened[str(answer.finish_reason)] += 1

    async def again(
        self, llm: AsyncLLM, prompt: list[int], params: SamplingParams, answer: str
    ) -> Completion:
        rng = self.disturbing
        scheduling = SchedulingParams(priority=rng.randint(-1, 1))
        if answer and rng.random() < 0.3:
            place = rng.randrange(len(answer))
            predicted = answer[:place] + rng.choice(("", "x", " other")) + answer[place + 1 :]
            params = msgspec.structs.replace(params, prediction=predicted or "x")
        return await llm.generate(prompt, params, scheduling)


def is_at_border(params: SamplingParams, found: Completion, wanted: Completion) -> bool:
    """Whether the first token that differs was drawn at the border of two neighbours, where the
    rounding of a sum decides: other rows in a step may change it. That is rare."""
    if params.temperature == 0.0:
        return False
    pairs = zip(found.token_ids, wanted.token_ids, strict=False)
    low, high = next((sorted(pair) for pair in pairs if len(set(pair)) > 1), (0, 0))
    between = [t for t in params.allowed_token_ids or range(low, high) if low < t < high]
    return low < high and not between


def check(request: object, found: Completion, wanted: Completion) -> None:
    """Raises Mismatch."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        if getattr(found, name) != getattr(wanted, name):
            raise Mismatch(
                f"{name} of {request}: {getattr(found, name)!r} with drafts, and "
                f"{getattr(wanted, name)!r} without"
            )
    assert (found.logprobs is None) == (wanted.logprobs is None)
    for own, other in zip(found.logprobs or (), wanted.logprobs or (), strict=True):
        top, others = ([value for _, value in entry.top] for entry in (own, other))
        if [own.logprob, *top] != pytest.approx([other.logprob, *others], abs=TOLERANCE):
            raise Mismatch(f"logprobs of {request}: {own} with drafts, and {other} without")


async def run(
    folders: dict[str, Path], cases: int, first: int = 0, in_round: int = ROUND
) -> Counter[str]:
    """Run so many cases, and say what happened in them."""
    happened: Counter[str] = Counter()
    for number in range(-(-cases // in_round)):
        family = list(folders)[number % len(folders)]
        one = Round(first + number)
        try:
            await one.go(folders[family], min(in_round, cases - number * in_round))
            assert one.happened["borders"] <= 2
        except BaseException:
            print(f"round {first + number} ({family}, {one.options})")
            raise
        happened += one.happened
    return happened


if __name__ == "__main__":
    main(__doc__, run, FAMILIES)
