"""However the tokens of an answer are cut into frames, the frames add up to the same message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.middleware import request_id
from asyncllm.server.openai.chat_reply import ChatReply
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Content, Formats
from asyncllm.types import FinishReason, SamplingParams, TokenDelta, TokenLogprob
from tests.support.server.fake_llm import FakeTokenizer

TOKENIZER: Any = FakeTokenizer()
READER = ChatReader(Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]), TOKENIZER)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "wait")]
TEXTS = [
    "Only text, nothing <else>.",
    "<think>Hm, \u00e9\U0001f600.</think>\n\nWell: 3 < 4.",
    '<think>Two calls</think>Here:<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call>"}}'
    '\n</tool_call>\n<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "\\u00e9"}',
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> and more',
    "<think>cut off in the mid",
    'So:<tool_call>\n{"name": "wait", "arguments": {}}</tool_call><tool_call>\n{"name": "add", "ar',
]


def deltas_of(text: str, finish: FinishReason) -> list[TokenDelta]:
    """One token per byte; a character comes with its last byte."""
    deltas = []
    for char in text:
        *first, last = char.encode()
        deltas += [_delta("", byte) for byte in first]
        deltas.append(_delta(char, last))
    deltas[-1].finish_reason = finish
    return deltas


def _delta(text: str, token: int) -> TokenDelta:
    return TokenDelta(text, [token], [TokenLogprob(token, -0.5, ((token, -0.5),))])


def merged(deltas: list[TokenDelta]) -> TokenDelta:
    whole = TokenDelta()
    for delta in deltas:
        whole.merge(delta)
    return whole


def reply(*, rich: bool) -> ChatReply:
    asked = ChatRequest(messages=[], stream=True, tools=TOOLS)
    if rich:
        asked.logprobs, asked.top_logprobs, asked.return_token_ids = True, 1, True
    params = SamplingParams()
    request_id.set("1")
    return ChatReply(asked, "m", Conversation([1], params, READER, TOOLS, ""), TOKENIZER)


def add_up(frames: bytes) -> dict[str, Any]:
    """What a client makes of a stream's frames."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": {}}
    whole |= {"logprobs": [], "token_ids": [], "finish_reason": None}
    for line in frames.decode().split("\n\n")[:-1]:
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            whole[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            known = whole["calls"].setdefault(call["index"], {"arguments": ""})
            known["name"] = call["function"].get("name") or known["name"]
            known["arguments"] += call["function"]["arguments"]
        if choice["logprobs"]:
            whole["logprobs"] += choice["logprobs"]["content"]
        whole["token_ids"] += choice.get("token_ids", ())
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return whole


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_cut_gives_the_same_message(text: str, rich: bool, data: st.DataObject) -> None:
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    deltas = deltas_of(text, finish)
    if finish is FinishReason.STOP:
        deltas[-1].stop_reason = data.draw(st.sampled_from([None, "END"]))
    cuts = data.draw(st.lists(st.integers(1, len(deltas) - 1), unique=True).map(sorted))
    streamed, whole = reply(rich=rich), reply(rich=rich)
    frames = b""
    for start, end in zip([0, *cuts], [*cuts, len(deltas)], strict=True):
        frames += streamed.frames(0, merged(deltas[start:end]))
    got = add_up(frames)
    [choice] = json.loads(whole.body([merged(deltas)]))["choices"]
    message = choice["message"]
    assert got["content"] == (message["content"] or "")
    assert got["reasoning"] == got["reasoning_content"] == message.get("reasoning", "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [got["calls"][i] for i in range(len(calls))] == calls
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
    assert got["finish_reason"] == choice["finish_reason"]
    assert got["logprobs"] == ((choice["logprobs"] or {}).get("content") or [])
    assert got["token_ids"] == choice.get("token_ids", [])


def test_the_texts_are_read_as_meant() -> None:
    messages = []
    for text in TEXTS:
        body = reply(rich=False).body([merged(deltas_of(text, FinishReason.STOP))])
        [choice] = json.loads(body)["choices"]
        messages.append((choice["message"], choice["finish_reason"]))
    assert [reason for _, reason in messages] == [
        *("stop", "stop", "tool_calls", "tool_calls", "stop", "stop", "tool_calls")
    ]
    two = messages[2][0]
    assert two["reasoning"] == two["reasoning_content"] == "Two calls"
    assert [call["function"]["name"] for call in two["tool_calls"]] == ["add", "wait"]
    assert two["tool_calls"][0]["function"]["arguments"] == '{"a": "</tool_call>"}'
    unknown = '{"name": "nobody", "arguments": {}} and more'
    assert messages[4][0] == {"role": "assistant", "content": unknown, "refusal": None}


def test_calls_that_are_cut_off() -> None:
    """One that a stop string breaks off is not to be made; what is hardly begun is not told."""
    half, begun = TEXTS[3], TEXTS[6]
    cases = [
        (half, FinishReason.LENGTH, None, "length", 1),
        (half, FinishReason.STOP, "END", "stop", 1),
        (half, FinishReason.STOP, None, "tool_calls", 1),
        (begun, FinishReason.LENGTH, None, "length", 1),
        (begun, FinishReason.STOP, "END", "tool_calls", 1),
    ]
    for text, finish, stop, reason, calls in cases:
        deltas = deltas_of(text, finish)
        deltas[-1].stop_reason = stop
        [choice] = json.loads(reply(rich=False).body([merged(deltas)]))["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], len(message["tool_calls"])) == (reason, calls)
        assert message["content"] == ("So:" if text is begun else None)


@pytest.mark.parametrize("stop", [None, "END"])
def test_a_forced_call_is_no_content_wherever_it_is_cut(stop: str | None) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for end in range(1, len(text)):
        deltas = deltas_of(text[:end], FinishReason.STOP if stop else FinishReason.LENGTH)
        deltas[-1].stop_reason = stop
        reader = Conversation(
            [1], SamplingParams(), READER, TOOLS, "", forced=True
        ).message_reader()
        events = [event for delta in deltas for event in reader.read(delta)]
        assert not any(isinstance(event, Content) for event in events)
