"""Tool calls over real sockets, in the form in which a template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import openai
import pytest

from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.parsing import choose_formats
from tests.support.server.fake_llm import FakeLLM, FakeTemplate
from tests.support.server.serving import Server
from tests.support.text.parsing_texts import WRITERS, tool, written
from tests.support.text.templates import CALLS, OTHER_CALLS, chat_template

TOOLS: Any = [tool("f", a={"type": "integer"}, b={"type": "object"}), tool("g")]
MADE = [("f", {"a": 1}), ("g", {})]


class LastMessage(FakeTemplate):
    """What was said last is all of the prompt, so that it is what the model says."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        text: str = messages[-1]["content"]
        return text


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    def make() -> FakeLLM:
        llm = FakeLLM()
        llm.chat_template = LastMessage()
        return llm

    return make


def answers(server: Server, text: str, **options: Any) -> list[tuple[str, list[Any], str | None]]:
    """Content, calls and finish_reason of what a model says, not streamed and streamed."""
    asked: Any = {"model": "fake", "messages": [{"role": "user", "content": text}], "tools": TOOLS}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        [whole] = client.chat.completions.create(**asked, **options).choices
        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(**asked, **options, stream=True)
        ]
    content = "".join(chunk.delta.content or "" for chunk in chunks)
    calls: dict[int, tuple[str, list[str]]] = {}
    for part in (part for chunk in chunks for part in chunk.delta.tool_calls or ()):
        assert part.function is not None
        calls.setdefault(part.index, (part.function.name or "", []))[1].append(
            part.function.arguments or ""
        )
    return [
        (
            whole.message.content or "",
            [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()],
            whole.finish_reason,
        ),
        (
            content,
            [(name, "".join(texts)) for name, texts in calls.values()],
            chunks[-1].finish_reason,
        ),
    ]


def use(server: Server, template: str) -> None:
    tokenizer: Any = server.llm.tokenizer
    server.llm.chat_reader = ChatReader(choose_formats(template), tokenizer)


@pytest.mark.parametrize("name", sorted(CALLS.keys() & WRITERS.keys()))
def test_calls_as_a_model_writes_them(server: Server, name: str) -> None:
    use(server, chat_template(CALLS[name]))
    text = written(name, MADE)
    for content, calls, reason in answers(server, "So:\n" + text):
        assert [(name, json.loads(arguments)) for name, arguments in calls] == MADE
        assert (content.strip(), reason) == ("So:", "tool_calls")
    # Wherever it is cut off, arguments are an object, and nothing of a marker is content.
    for length in range(max(1, len(text) - 30), len(text), 7):
        size = len(text.encode()[:length])
        for content, calls, reason in answers(server, text, max_tokens=size):
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
            assert (reason, "<" in content) == ("length", False)


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_calls_of_a_template_that_is_not_listed(server: Server, kind: str) -> None:
    template, text = OTHER_CALLS[kind]
    use(server, chat_template(template))
    for content, calls, reason in answers(server, text):
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("f", {"a": 1}),
            ("f", {}),
        ]
        assert (content.strip(), reason) == ("", "tool_calls")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", ["glm4", "pythonic", "hermes"])
def test_what_no_grammar_can_enforce_is_named(server: Server, name: str, path: str) -> None:
    """GLM-4's calls begin with a name, as other text may."""
    use(server, chat_template(CALLS[name]))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body: dict[str, Any] = {"model": "fake", "parallel_tool_calls": False}
    function: dict[str, Any] = {"name": "f", "strict": True, "parameters": schema}
    if path == "/v1/responses":
        body |= {"input": "Hi", "tools": [{"type": "function", **function}]}
    else:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        body["tools"] = [{"type": "function", "function": function}]
    if path == "/v1/messages":
        del body["parallel_tool_calls"]
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        body["tools"] = [{"name": "f", "strict": True, "input_schema": schema}]
    expected = "tools.strict, parallel_tool_calls" if name == "glm4" else None
    answer = server.post(path, body)
    assert (answer.status, answer.headers.get("X-Ignored-Parameters")) == (200, expected)
    # A grammar for the whole answer is the only one.
    if path == "/v1/chat/completions":
        answer = server.post(path, body | {"response_format": {"type": "json_object"}})
        assert answer.headers["X-Ignored-Parameters"] == "tools.strict, parallel_tool_calls"
    body["tool_choice"] = {"type": "any"} if path == "/v1/messages" else "required"
    answer = server.post(path, body)
    assert (answer.status, answer.headers.get("X-Ignored-Parameters")) == (200, None)
