"""However the tokens of a message are cut, its events are in order and add up to the same."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic.types as anthropic_types
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.server.anthropic.reply import MessageReply
from asyncllm.server.chat.conversation import Conversation
from asyncllm.types import FinishReason, SamplingParams, TokenDelta
from tests.http.openai.test_chat_cuts import READER, TEXTS, TOOLS, deltas_of, merged

EVENT: Any = pydantic.TypeAdapter(anthropic_types.RawMessageStreamEvent)
BEGUN: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def reply(context: int = 10_000) -> MessageReply:
    conversation = Conversation([1], SamplingParams(), READER, TOOLS, "")
    return MessageReply("m", conversation, context=context)


class Reader:
    """A client that believes the deltas."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self._json = ""
        self._open = False
        self._ended = False

    def read(self, events: bytes) -> None:
        for event in events.decode().split("\n\n")[:-1]:
            match = re.fullmatch("event: (.+)\ndata: (.+)", event)
            assert match
            body = json.loads(match[2])
            assert body["type"] == match[1]
            self._take(body)

    def _take(self, body: dict[str, Any]) -> None:
        assert not self._ended
        content = self.message.get("content", [])
        match body["type"]:
            case "message_start":
                assert not self.message
                self.message = body["message"]
            case "content_block_start":
                assert (self._open, body["index"]) == (False, len(content))
                block = body["content_block"]
                assert BEGUN[block["type"]].items() <= block.items()
                content.append(block)
                self._open, self._json = True, ""
            case "content_block_delta":
                assert (self._open, body["index"]) == (True, len(content) - 1)
                delta = body["delta"]
                if delta["type"] == "input_json_delta":
                    self._json += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    content[-1][name] += delta[name]
            case "content_block_stop":
                assert (self._open, body["index"]) == (True, len(content) - 1)
                self._open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = whole_json(self._json)
            case "message_delta":
                assert not self._open
                self.message |= body["delta"] | {"usage": body["usage"]}
            case "message_stop":
                self._ended = True


def whole_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is random, and without a count that needs tokens that the fake has not."""
    blocks = [block | {"id": None} for block in message["content"]]
    usage = message["usage"] | {"output_tokens_details": None}
    return message | {"id": None, "content": blocks, "usage": usage}


@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_cut_gives_the_same_message(text: str, data: st.DataObject) -> None:
    deltas = deltas_of(text, data.draw(st.sampled_from(FinishReason)))
    deltas[-1].stop_reason = data.draw(st.sampled_from([None, "END", 7]))
    cuts = data.draw(st.lists(st.integers(1, len(deltas) - 1), unique=True).map(sorted))
    streamed, whole = reply(), reply()
    client = Reader()
    client.read(streamed.opening())
    for start, end in zip([0, *cuts], [*cuts, len(deltas)], strict=True):
        client.read(streamed.frames(0, merged(deltas[start:end])))
    client.read(streamed.closing())
    body = whole.body([merged(deltas)])
    assert comparable(client.message) == comparable(json.loads(body))
    anthropic_types.Message.model_validate_json(body, strict=True)


def test_events_are_anthropics() -> None:
    """Their types take them, strictly: no number for a string, nothing missing."""
    for text in TEXTS:
        streamed, whole = reply(), merged(deltas_of(text, FinishReason.STOP))
        events = streamed.opening() + streamed.frames(0, whole) + streamed.closing()
        for data in re.findall("data: (.+)", events.decode()):
            if data != '{"type":"ping"}':
                EVENT.validate_json(data, strict=True)


def test_the_texts_are_read_as_meant() -> None:
    contents = []
    for text in TEXTS:
        body = reply().body([merged(deltas_of(text, FinishReason.STOP))])
        contents.append([block["type"] for block in json.loads(body)["content"]])
    assert contents == [
        *(["text"], ["thinking", "text"], ["thinking", "text", "tool_use", "tool_use"]),
        *(["tool_use"], ["text"], ["thinking"], ["text", "tool_use", "text"]),
    ]


@pytest.mark.parametrize(
    ("text", "finish", "stop", "context", "reason", "sequence"),
    [
        ("a", FinishReason.STOP, None, 99, "end_turn", None),
        ("a", FinishReason.STOP, 7, 99, "end_turn", None),
        ("a", FinishReason.STOP, "END", 99, "stop_sequence", "END"),
        ("abc", FinishReason.LENGTH, None, 99, "max_tokens", None),
        ("abc", FinishReason.LENGTH, None, 4, "model_context_window_exceeded", None),
        ("a", FinishReason.ABORT, None, 99, "pause_turn", None),
        (TEXTS[2], FinishReason.STOP, None, 999, "tool_use", None),
        (TEXTS[2], FinishReason.LENGTH, None, 999, "max_tokens", None),
    ],
)
def test_why_it_ended(
    text: str,
    finish: FinishReason,
    stop: str | int | None,
    context: int,
    reason: str,
    sequence: str | None,
) -> None:
    deltas = deltas_of(text, finish)
    deltas[-1].stop_reason = stop
    message = json.loads(reply(context).body([merged(deltas)]))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_what_was_cached_is_counted_apart() -> None:
    conversation = Conversation([1] * 10, SamplingParams(), READER, (), "")
    made = MessageReply("m", conversation, context=99)
    delta = TokenDelta("a", [1], finish_reason=FinishReason.STOP, cached_tokens=4)
    usage = json.loads(made.body([delta]))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)
