"""Print an answer while it is being generated.

python examples/stream.py [QUESTION]
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import AsyncLLM, SamplingParams

QUESTION = "Tell me a story about a dragon named Momo."


async def main(question: str = QUESTION) -> None:
    async with AsyncLLM() as llm:
        messages = [{"role": "user", "content": question}]
        async for delta in llm.stream(messages, SamplingParams(max_tokens=200)):
            print(delta.text, end="", flush=True)
    print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
