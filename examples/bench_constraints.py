"""What constraints on the output cost: tokens per second with all rows constrained, and with none.

    python examples/bench_constraints.py [--model FOLDER] [--device cpu] [--rows 16 64]

Each kind of constraint runs in turns with none, so that a machine that is busy at times is so for
both. All rows have the same number of tokens to make, and no constraint ends one early.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.text.grammar import JsonSchema, Regex

#: Answers that are longer than what is measured.
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
ROUNDS = 5
NUM_TOKENS = 128


def kinds(vocab: int) -> dict[str, dict[str, Any]]:
    """What is asked for, by name."""
    draw = random.Random(0)
    ids = draw.sample(range(vocab), min(vocab, 1300))
    return {
        "logit_bias of 300": {"logit_bias": {token: draw.uniform(-2, 2) for token in ids[:300]}},
        "allowed_token_ids": {"allowed_token_ids": ids[: vocab // 2]},
        "bad_words of one token": {"bad_words": [(token,) for token in ids[:200]]},
        "bad_words of several": {"bad_words": list(zip(ids[:200], ids[200:], strict=False))},
        "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        "grammar: a regex": {"grammar": Regex("[ -~]*"), "min_tokens": NUM_TOKENS},
        "grammar: a JSON schema": {"grammar": JsonSchema(LISTS)},
    }


async def seconds(llm: AsyncLLM, prompts: list[list[int]], **asked: Any) -> float:
    """How long it takes to answer all prompts at once."""
    started = time.perf_counter()
    await asyncio.gather(
        *(
            llm.generate(
                prompt,
                SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **asked),
            )
            for seed, prompt in enumerate(prompts)
        )
    )
    return time.perf_counter() - started


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of CPU kernels")
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 64])
    options = parser.parse_args()
    draw = random.Random(1)
    config: dict[str, Any] = {"device": options.device, "cpu_threads": options.threads}
    async with AsyncLLM(options.model, **config, prefix_caching=False) as llm:
        vocab = llm.limits.vocab_size
        for rows in options.rows:
            prompts = [[draw.randrange(vocab) for _ in range(16)] for _ in range(rows)]
            await seconds(llm, prompts)
            print(f"\n{rows} rows of {NUM_TOKENS} tokens, best and median of {ROUNDS} rounds")
            print(f"{'':>24} {'none, tok/s':>12} {'with it':>9} {'share':>6} {'median':>7}")
            for name, asked in kinds(vocab).items():
                plain, constrained = [], []
                for _ in range(ROUNDS):
                    plain.append(await seconds(llm, prompts))
                    constrained.append(await seconds(llm, prompts, **asked))
                share = min(plain) / min(constrained)
                median = statistics.median(p / c for p, c in zip(plain, constrained, strict=True))
                tokens = rows * NUM_TOKENS
                print(
                    f"{name:>24} {tokens / min(plain):>12.0f} {tokens / min(constrained):>9.0f} "
                    f"{share:>6.2f} {median:>7.2f}"
                )


if __name__ == "__main__":
    asyncio.run(main())
