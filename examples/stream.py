"""Print an answer while it is being generated.

python examples/stream.py [QUESTION]
"""

from __future__ import annotations

import argparse
import asyncio

from asyncllm import AsyncLLM, SamplingParams

QUESTION = "Tell me a story about a dragon named Momo."


async def main(question: str) -> None:
    async with AsyncLLM() as llm:
        messages = [{"role": "user", "content": question}]
        async for delta in llm.stream(messages, SamplingParams(max_tokens=200)):
            print(delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print an answer while it is being generated.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    asyncio.run(main(parser.parse_args().question))
