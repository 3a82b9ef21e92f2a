"""Two questions to a model in this process; without arguments, to the built-in demo model.

python examples/quickstart.py [MODEL]
"""

from __future__ import annotations

import argparse

from asyncllm import LLM, SamplingParams

QUESTIONS = ["What is 27 + 45?", "Reverse the word planet."]


def main(model: str | None) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(model) as llm:
        for output in llm.generate(conversations, SamplingParams(temperature=0.0, max_tokens=100)):
            print(output.text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a model in this process two questions.")
    parser.add_argument("model", nargs="?", help="folder or hub id; the demo by default")
    main(parser.parse_args().model)
