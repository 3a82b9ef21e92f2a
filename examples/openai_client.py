"""Ask a running server with OpenAI's own client, and print the answer as it comes.

asyncllm serve
python examples/openai_client.py [URL] [QUESTION]
"""

from __future__ import annotations

import argparse
import sys

try:
    import openai
except ImportError:
    sys.exit("this example needs OpenAI's client: pip install openai")

URL = "http://127.0.0.1:8000/v1"
QUESTION = "What is 27 + 45?"


def main(url: str, question: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        sys.exit(f"no server at {url}: start one with 'asyncllm serve'")
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a running server a question.")
    parser.add_argument("url", nargs="?", default=URL, help=f"default: {URL}")
    parser.add_argument("question", nargs="?", default=QUESTION)
    args = parser.parse_args()
    main(args.url, args.question)
