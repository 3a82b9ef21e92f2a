"""What constraints on the output cost: tokens per second with every row constrained, or with none.

    python examples/bench_constraints.py [--model FOLDER] [--device cpu] [--rows 16 64] [--quick]

Constrained and unconstrained runs alternate, so that other load on the machine affects both. All
rows generate the same number of tokens; no constraint ends one early.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.text.grammar import JsonSchema, Regex

#: Answers are longer than the tokens measured.
LISTS = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def kinds(vocab: int, num_tokens: int) -> dict[str, dict[str, Any]]:
    """The sampling parameters of each constraint, by name."""
    draw = random.Random(0)
    ids = draw.sample(range(vocab), min(vocab, 1300))
    return {
        "logit_bias of 300": {"logit_bias": {token: draw.uniform(-2, 2) for token in ids[:300]}},
        "allowed_token_ids": {"allowed_token_ids": ids[: vocab // 2]},
        "bad_words of one token": {"bad_words": [(token,) for token in ids[:200]]},
        "bad_words of several": {"bad_words": list(zip(ids[:200], ids[200:], strict=False))},
        "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        "grammar: a regex": {"grammar": Regex("[ -~]*"), "min_tokens": num_tokens},
        "grammar: a JSON schema": {"grammar": JsonSchema(LISTS)},
    }


async def seconds(
    llm: AsyncLLM, prompts: list[list[int]], num_tokens: int, **constraint: Any
) -> float:
    """Seconds to answer all prompts at once."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            llm.generate(
                prompt,
                SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, **constraint),
            )
            for seed, prompt in enumerate(prompts)
        )
    )
    return time.perf_counter() - started


async def measure(llm: AsyncLLM, rows: int, tokens: int, rounds: int, bar: tqdm[Any]) -> None:
    """Print a table for a number of rows; each run moves the bar."""
    vocab = llm.limits.vocab_size
    draw = random.Random(1)
    prompts = [[draw.randrange(vocab) for _ in range(16)] for _ in range(rows)]

    async def once(**constraint: Any) -> float:
        took = await seconds(llm, prompts, tokens, **constraint)
        bar.update()
        return took

    await seconds(llm, prompts, tokens)
    tqdm.write(f"\n{rows} rows of {tokens} tokens, best and median of {rounds} rounds")
    tqdm.write(f"{'':>24} {'none, tok/s':>12} {'with it':>9} {'share':>6} {'median':>7}")
    for name, constraint in kinds(vocab, tokens).items():
        plain, constrained = [], []
        for _ in range(rounds):
            plain.append(await once())
            constrained.append(await once(**constraint))
        share = min(plain) / min(constrained)
        median = statistics.median(p / c for p, c in zip(plain, constrained, strict=True))
        count = rows * tokens
        tqdm.write(
            f"{name:>24} {count / min(plain):>12.0f} {count / min(constrained):>9.0f} "
            f"{share:>6.2f} {median:>7.2f}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of CPU kernels")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of each row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.tokens, options.rounds = [4], 16, 1
    config: dict[str, Any] = {"device": options.device, "cpu_threads": options.threads}
    async with AsyncLLM(options.model, **config, prefix_caching=False) as llm:
        runs = 2 * options.rounds * len(options.rows) * len(kinds(llm.limits.vocab_size, 1))
        with tqdm(total=runs, unit="run", disable=None) as bar:
            for rows in options.rows:
                await measure(llm, rows, options.tokens, options.rounds, bar)


if __name__ == "__main__":
    asyncio.run(main())
