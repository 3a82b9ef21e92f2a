"""Ask the same question several times at once and keep the first answer; the rest is cancelled.

A cancelled task is a cancelled request: its KV pages are free within one step.

    python examples/race.py
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from asyncllm import AsyncLLM, SamplingParams

QUESTION = [{"role": "user", "content": "Tell me a short story."}]


async def main() -> None:
    async with AsyncLLM() as llm:
        print("four answers race ...", file=sys.stderr)
        tasks = [
            asyncio.create_task(
                llm.generate(QUESTION, SamplingParams(temperature=0.8, seed=seed, max_tokens=200))
            )
            for seed in range(4)
        ]
        done, losers = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in losers:
            task.cancel()
        await asyncio.gather(*losers, return_exceptions=True)
        print(done.pop().result().text)
        print(f"({len(losers)} cancelled, {llm.stats.finished['abort']} aborted in the engine)")


if __name__ == "__main__":
    argparse.ArgumentParser(description="Keep the first of four answers.").parse_args()
    asyncio.run(main())
