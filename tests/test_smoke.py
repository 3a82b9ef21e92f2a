"""Every way in, once: what must work with whatever versions of the dependencies are installed.

It needs pytest and no plugin of it, so ``make test-floors`` runs it where every dependency is the
oldest that pyproject.toml allows.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from asyncllm import LLM, AsyncLLM, SamplingParams
from tests.support.server.serving import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = [{"role": "user", "content": "What is 27 + 45?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess("--cpu-threads", "1")
    yield running
    assert running.stop() == 0


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    request = Request(server.url + path, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
    return found


def chat(server: ServerProcess, **fields: Any) -> bytes:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}
    return post(server, "/v1/chat/completions", body | fields)


def test_a_chat_is_answered(server: ServerProcess) -> None:
    answer = json.loads(chat(server))
    assert "72" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


def test_a_chat_is_streamed(server: ServerProcess) -> None:
    *frames, done, _ = chat(server, stream=True).decode().split("\n\n")
    assert done == "data: [DONE]"
    deltas = [json.loads(frame.removeprefix("data: "))["choices"][0]["delta"] for frame in frames]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == json.loads(chat(server))["choices"][0]["message"]["content"]


def test_an_answer_keeps_to_its_schema(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = json.loads(chat(server, response_format=form))
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert found.keys() == {"sum"}
    assert 0 <= found["sum"] <= 99


def test_texts_have_embeddings(server: ServerProcess) -> None:
    answer = json.loads(post(server, "/v1/embeddings", {"input": ["one", "two"]}))
    [one, two] = [row["embedding"] for row in answer["data"]]
    assert sum(x * x for x in one) == pytest.approx(1, abs=1e-3)
    assert one != two


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/openapi.json"])
def test_what_is_served_can_be_looked_up(server: ServerProcess, path: str) -> None:
    with urlopen(server.url + path, timeout=10) as answer:
        assert answer.status == 200
        assert answer.read()


def test_lists_of_prompts_are_answered_offline() -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM() as llm:
        answers = llm.generate(["One", "Two", "Three"], params)
    assert len(answers) == 3
    assert all(answer.text for answer in answers)


def test_a_program_generates_in_its_own_loop() -> None:
    async def main() -> str:
        async with AsyncLLM() as llm:
            params = SamplingParams(max_tokens=40, temperature=0)
            return "".join([delta.text async for delta in llm.stream(QUESTION, params)])

    assert "72" in asyncio.run(main())
