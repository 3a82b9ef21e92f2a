"""Semantic search: which of a few sentences are nearest to a question.

    python examples/embeddings.py [MODEL or URL] [QUESTION]

The built-in demo model knows few words. Models that were trained for embeddings, such as
Qwen/Qwen3-Embedding-0.6B, know what sentences mean.
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np

from asyncllm import AsyncLLM, Client, EmbeddingParams

SENTENCES = [
    "What is 27 + 45?",
    "How much is 12 times 9?",
    "Once upon a time there was a little fox.",
    "The old king told the children a story.",
    "Reverse the word planet.",
    "How many letters are in the word garden?",
    "What day comes after Monday?",
]
QUESTION = "What is 3 + 4?"


async def nearest(llm: AsyncLLM | Client, question: str) -> list[tuple[float, str]]:
    """Cosine and sentence, best first: of vectors of length 1 the cosine is the dot product."""
    params = EmbeddingParams(pooling="mean")
    sentences = await llm.embed(SENTENCES, params)
    cosines = sentences @ await llm.embed(question, params)
    return [(float(cosines[i]), SENTENCES[i]) for i in np.argsort(-cosines)]


async def main(model: str | None, question: str) -> None:
    is_url = model is not None and model.startswith(("http://", "https://"))
    async with Client(model) if model is not None and is_url else AsyncLLM(model) as llm:
        for cosine, sentence in await nearest(llm, question):
            print(f"{cosine:6.3f}  {sentence}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the sentences nearest to a question.")
    parser.add_argument("model", nargs="?", help="folder, hub id or URL of a server")
    parser.add_argument("question", nargs="?", default=QUESTION)
    args = parser.parse_args()
    asyncio.run(main(args.model, args.question))
