"""Ollama's /api/chat and /api/generate, by Ollama's own client and byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from asyncllm.text.grammar import JsonObject, JsonSchema
from tests.support.server.fake_llm import MAX_LEN, FakeLLM
from tests.support.server.ollama_client import (
    CHAT,
    ECHO,
    GENERATE,
    HELLO,
    client,
    say,
    speaker,
    tool,
)
from tests.support.server.serving import Server, serving

COUNTERS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


@pytest.fixture(scope="module")
def speaking() -> Iterator[Server]:
    with serving(speaker) as running:
        yield running
        running.until_idle()


# -- answers ---------------------------------------------------------------------------------------


def test_chat_by_the_official_client(server: Server) -> None:
    with client(server) as ours:
        answer = ours.chat("fake", HELLO["messages"])
        parts = list(ours.chat("fake", HELLO["messages"], stream=True))
    assert answer.message.role == "assistant"
    assert answer.message.content == ECHO
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(ECHO.encode())
    assert answer.eval_count == len(ECHO.encode()) + 1
    assert "".join(part.message.content or "" for part in parts) == ECHO
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop"
    assert parts[-1].eval_count == answer.eval_count


def test_generate_by_the_official_client(server: Server) -> None:
    with client(server) as ours:
        answer = ours.generate("fake", "aé", system="be brief")
        parts = list(ours.generate("fake", "aé", system="be brief", stream=True))
    expected = "system: be brief\nuser: aé\nassistant: "
    assert answer.response == expected
    assert "".join(part.response or "" for part in parts) == expected
    assert answer.done_reason == parts[-1].done_reason == "stop"


async def test_the_asynchronous_client(server: Server) -> None:
    async with ollama.AsyncClient(server.url) as ours:
        text = ""
        async for part in await ours.chat("fake", HELLO["messages"], stream=True):
            text += part.message.content or ""
    assert text == ECHO


def test_raw_is_the_prompt_itself(server: Server) -> None:
    answer = server.post(GENERATE, {"model": "fake", "prompt": "[INST] é", "raw": True}).lines
    assert "".join(line["response"] for line in answer) == "[INST] é"


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_streams_are_lines_and_the_default(server: Server, path: str) -> None:
    body = HELLO if path == CHAT else {"model": "fake", "prompt": "aé"}
    answer = server.post(path, body)
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    *lines, last = answer.lines
    assert not any(line["done"] for line in lines)
    assert not any(name in line for line in lines for name in COUNTERS)
    assert last["done"]
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in COUNTERS)
    whole = server.post(path, body | {"stream": False})
    assert whole.headers["Content-Type"].startswith("application/json")
    assert whole.json["done"]


def test_durations_are_nanoseconds_that_add_up() -> None:
    with serving(lambda: FakeLLM(step_seconds=0.01)) as slow:
        answer = slow.post(CHAT, HELLO | {"stream": False}).json
    # The fake says that each of its steps takes a second.
    assert answer["prompt_eval_duration"] == 1e9
    assert answer["eval_duration"] == (answer["eval_count"] - 1) * 1e9
    assert 0.01e9 * answer["eval_count"] < answer["total_duration"] < 20e9


def test_logprobs(server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    whole = server.post(CHAT, HELLO | fields | {"stream": False}).json["logprobs"]
    lines = server.post(CHAT, HELLO | fields).lines
    assert [entry for line in lines for entry in line.get("logprobs", ())] == whole
    assert len(whole) == len(ECHO.encode()) + 1
    assert whole[0]["token"] == "u"
    assert len(whole[0]["top_logprobs"]) == 2
    with client(server) as ours:
        answer = ours.chat("fake", HELLO["messages"], logprobs=True)
    assert answer.logprobs is not None
    assert answer.logprobs[0].token == "u"


# -- what is asked ---------------------------------------------------------------------------------


def test_options_reach_the_engine(server: Server) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["q", "z"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "num_ctx": 64,
        "num_gpu": 1,
    }
    answer = server.post(CHAT, HELLO | {"options": options, "stream": False})
    assert answer.headers["X-Ignored-Parameters"] is None
    assert (answer.json["done_reason"], answer.json["eval_count"]) == ("length", 3)
    params = server.llm.params[-1]
    found = (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p)
    assert found == (3, 0.5, 7, 0.8, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (11, ("q", "z"), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.75)


def test_what_is_not_given_is_the_models_own(server: Server) -> None:
    server.post(CHAT, HELLO | {"options": {"num_predict": -1, "seed": -1}, "stream": False})
    params = server.llm.params[-1]
    assert (params.temperature, params.max_tokens, params.seed) == (0.7, None, None)


def test_more_than_fits_is_what_fits(server: Server) -> None:
    for path, prompt in ((CHAT, ECHO), (GENERATE, ECHO)):
        body = HELLO if path == CHAT else {"model": "fake", "prompt": "aé"}
        answer = server.post(path, body | {"options": {"num_predict": 10**6}, "stream": False})
        assert answer.json["done_reason"] == "stop"
        assert server.llm.params[-1].max_tokens == MAX_LEN - len(prompt.encode())


def test_what_has_no_effect_is_said(server: Server) -> None:
    options = {"mirostat": 2, "typical_p": 1.0, "tfs_z": 0.5, "num_ctx": MAX_LEN + 1, "numa": True}
    answer = server.post(CHAT, HELLO | {"options": options | {"mirrostat": 1}, "oops": 1})
    ignored = (answer.headers["X-Ignored-Parameters"] or "").split(", ")
    assert sorted(ignored) == [
        "oops",
        "options.mirostat",
        "options.mirrostat",
        "options.num_ctx",
        "options.tfs_z",
    ]


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ("json", JsonObject()),
        ({"type": "array"}, JsonSchema({"type": "array"})),
        ("", None),
        (None, None),
    ],
)
def test_format(server: Server, form: Any, grammar: Any) -> None:
    for path, body in ((CHAT, HELLO), (GENERATE, {"model": "fake", "prompt": "a", "raw": True})):
        server.post(path, body | {"format": form, "stream": False})
        assert server.llm.params[-1].grammar == grammar


@pytest.mark.parametrize(
    ("think", "seen"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        (None, {}),
    ],
)
def test_think_is_for_the_template(speaking: Server, think: Any, seen: dict[str, Any]) -> None:
    template = speaking.llm.chat_template
    assert template is not None
    for path, body in ((CHAT, say("a")), (GENERATE, {"model": "fake", "prompt": "a"})):
        answer = speaking.post(path, body | {"think": think})
        assert answer.status == 200, answer.body
        options = template.seen[1]
        for name in ("enable_thinking", "reasoning_effort"):
            assert options.get(name) == seen.get(name)


def test_a_conversation_with_a_tool(speaking: Server) -> None:
    """As the client sends its own answers back."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    with client(speaking) as ours:
        ours.chat("fake", messages, tools=[tool("add")])
    template = speaking.llm.chat_template
    assert template is not None
    seen, options = template.seen
    assert seen[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert seen[1]["reasoning_content"] == "Hm."
    assert seen[2] == {"role": "tool", "content": "2", "name": "add"}
    assert options["tools"][0]["function"]["name"] == "add"


def test_tools_of_another_kind_are_left_out_and_named(speaking: Server) -> None:
    body = {**say("a"), "tools": [{"type": "web_search"}, tool("add"), {"function": {"name": "b"}}]}
    answer = speaking.post(CHAT, body)
    assert (answer.status, answer.headers["X-Ignored-Parameters"]) == (200, "tools[0].web_search")
    template = speaking.llm.chat_template
    assert template is not None
    tools = template.seen[1]["tools"]
    assert [each["function"]["name"] for each in tools] == ["add", "b"]
    alone = speaking.post(CHAT, {**say("a"), "tools": [{"type": "web_search"}]})
    assert (alone.status, alone.headers["X-Ignored-Parameters"]) == (200, "tools[0].web_search")
    assert template.seen[1]["tools"] is None


CALLS = (
    "<think>Hm, é.</think>Here:"
    '<tool_call>{"name": "add", "arguments": {"a": 12345678901234567890123}}</tool_call>'
    '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
)


def test_calls_and_thinking(speaking: Server) -> None:
    with client(speaking) as ours:
        messages = say(CALLS)["messages"]
        answer = ours.chat("fake", messages, tools=[tool("add"), tool("wait")])
    message = answer.message
    assert (message.thinking, message.content) == ("Hm, é.", "Here:")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [("add", {"a": 12345678901234567890123}), ("wait", {})]
    assert answer.done_reason == "stop"


def test_generate_has_thinking_too(speaking: Server) -> None:
    body = {"model": "fake", "prompt": "<think>Hm.</think>So.", "stream": False}
    answer = speaking.post(GENERATE, body).json
    assert (answer["thinking"], answer["response"]) == ("Hm.", "So.")


def test_every_line_is_json_on_its_own(speaking: Server) -> None:
    body = speaking.post(CHAT, say("a\nb\u2028c")).body
    texts = [json.loads(line)["message"]["content"] for line in body.split(b"\n") if line]
    assert "".join(texts) == "a\nb\u2028c"


def test_an_aborted_answer_says_so() -> None:
    with serving() as held:
        held.call(held.llm.hold)
        socket = held.open(CHAT, HELLO, extra="X-Request-Id: long\r\n")
        held.until(lambda: held.llm.stats.waiting == 1)
        assert held.post("/v1/requests/long/abort", {}).status == 200
        held.call(held.llm.resume)
        received = b""
        while b'"done":true' not in received:
            received += socket.recv(4096)
        socket.close()
        held.until_idle()
    assert b'"done_reason":"abort"' in received
