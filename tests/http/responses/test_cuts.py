"""However the tokens of a response are cut, its events are in order and add up to the same."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import openai.types.responses as openai_types
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.server.arrivals.names import Numbers
from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.responses.conversion import response_of
from asyncllm.server.responses.reply import ResponseReply
from asyncllm.server.responses.requests import ResponsesRequest
from asyncllm.server.responses.schemas import Response
from asyncllm.server.responses.tools import Offers
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.parsing import Formats
from asyncllm.types import FinishReason, SamplingParams, TokenDelta
from tests.http.openai.test_chat_cuts import READER, TEXTS, TOKENIZER, TOOLS, deltas_of, merged

PLAIN = ChatReader(Formats(), TOKENIZER)
EVENT: Any = pydantic.TypeAdapter(openai_types.ResponseStreamEvent)


def reply(
    kept: list[Any], *, streams: bool, scored: bool = False, reads: bool = True
) -> ResponseReply:
    chat = ChatRequest(messages=[])
    response = response_of(ResponsesRequest(input=""), chat, SamplingParams(), "m", Numbers())
    response.id = "resp_1"
    reader, tools = (READER, TOOLS) if reads else (PLAIN, [])
    conversation = Conversation([1], SamplingParams(), reader, tools, "")
    tokenizer = TOKENIZER if scored else None

    def keep(response: Response) -> None:
        kept.append(json.loads(msgspec.json.encode(response)))

    options: dict[str, Any] = {"offers": Offers((), []), "seals": False, "tokenizer": tokenizer}
    return ResponseReply(response, conversation, streams=streams, keep=keep, **options)


class Reader:
    """A client that believes the deltas, and holds all else against them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {}
        self._told = 0
        self._open: str | None = None

    def read(self, events: bytes) -> None:
        for event in events.decode().split("\n\n")[:-1]:
            match = re.fullmatch("event: (.+)\ndata: (.+)", event)
            assert match
            body = json.loads(match[2])
            assert (body["type"], body["sequence_number"]) == (match[1], self._told)
            self._told += 1
            self._take(body)

    def _take(self, body: dict[str, Any]) -> None:
        kind = body["type"].removeprefix("response.")
        if "response" in body:
            assert self._open is None
            self.response = body["response"]
            return
        if kind == "output_item.added":
            assert (self._open, body["output_index"]) == (None, len(self.items))
            assert body["item"]["status"] == "in_progress"
            self._open = body["item"]["id"]
            self.items.append(body["item"] | {"so_far": "", "scores": [], "ended": False})
            return
        item = self.items[-1]
        assert body["output_index"] == len(self.items) - 1
        assert body.get("item_id", self._open) == self._open == item["id"]
        if kind == "output_item.done":
            assert item["ended"]
            self._open = None
            item["done"] = body["item"]
        elif kind == "content_part.added":
            assert item["content"] == []
            item["content"].append(body["part"])
        elif kind == "content_part.done":
            assert item["ended"]
            assert body["part"]["text"] == item["so_far"]
        elif kind.endswith(".delta"):
            assert not item["ended"]
            item["so_far"] += body["delta"]
            item["scores"] += body.get("logprobs", ())
        else:
            text = body["arguments"] if item["type"] == "function_call" else body["text"]
            assert (kind[-5:], text) == (".done", item["so_far"])
            item["ended"] = True


def without_call_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item | {"call_id": None} for item in output]


@pytest.mark.parametrize(("scored", "reads"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=40)
def test_any_cut_gives_the_same_response(
    text: str, scored: bool, reads: bool, data: st.DataObject
) -> None:
    finish = data.draw(st.sampled_from(FinishReason))
    deltas = deltas_of(text, finish)
    cuts = data.draw(st.lists(st.integers(1, len(deltas) - 1), unique=True).map(sorted))
    kept: list[Any] = []
    streamed, whole = (
        reply(kept, streams=each, scored=scored, reads=reads) for each in (True, False)
    )
    client = Reader()
    client.read(streamed.opening())
    for start, end in zip([0, *cuts], [*cuts, len(deltas)], strict=True):
        client.read(streamed.frames(0, merged(deltas[start:end])))
    client.read(streamed.closing())
    body = json.loads(whole.body([merged(deltas)]))
    assert without_call_ids(client.response["output"]) == without_call_ids(body["output"])
    assert client.response["output"] == [item["done"] for item in client.items]
    for name in ("status", "incomplete_details"):
        assert client.response.get(name) == body.get(name)
    assert (
        client.response["usage"]["total_tokens"] == body["usage"]["total_tokens"] == len(deltas) + 1
    )
    assert [response["id"] for response in kept] == ["resp_1", "resp_1"]
    if scored:
        for item, told in zip(body["output"], client.items, strict=True):
            if item["type"] == "message":
                [part] = item["content"]
                made = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
                assert made.decode() == part["text"] == told["so_far"]
                assert told["scores"] == part["logprobs"]
    if not reads:
        assert body["output"][0]["content"][0]["text"] == text


def test_the_texts_are_read_as_meant() -> None:
    outputs = []
    for text in TEXTS:
        kept: list[Any] = []
        body = reply(kept, streams=False).body([merged(deltas_of(text, FinishReason.STOP))])
        outputs.append([item["type"] for item in json.loads(body)["output"]])
    call = "function_call"
    assert outputs == [
        *(["message"], ["reasoning", "message"], ["reasoning", "message", call, call]),
        *([call], ["message"], ["reasoning"], ["message", call, "message"]),
    ]


@pytest.mark.parametrize("scored", [False, True])
def test_events_are_openais(scored: bool) -> None:
    """Their types take them, strictly: no number for a string, nothing missing."""
    for text in TEXTS:
        streamed = reply([], streams=True, scored=scored)
        whole = merged(deltas_of(text, FinishReason.STOP))
        events = streamed.opening() + streamed.frames(0, whole) + streamed.closing()
        for data in re.findall("data: (.+)", events.decode()):
            EVENT.validate_json(data, strict=True)


@pytest.mark.parametrize(
    ("finish", "status", "item", "event"),
    [
        (FinishReason.STOP, "completed", "completed", "response.completed"),
        (FinishReason.LENGTH, "incomplete", "incomplete", "response.incomplete"),
        (FinishReason.ABORT, "cancelled", "incomplete", "response.incomplete"),
    ],
)
def test_ends(finish: FinishReason, status: str, item: str, event: str) -> None:
    kept: list[Any] = []
    streamed = reply(kept, streams=True)
    streamed.frames(0, merged(deltas_of("<think>a</think>b", finish)))
    last = streamed.closing().decode()
    assert last.startswith(f"event: {event}\n")
    [response] = kept
    assert response["status"] == status
    assert [each["status"] for each in response["output"]] == ["completed", item]


def test_an_empty_answer_has_an_empty_text() -> None:
    kept: list[Any] = []
    client = Reader()
    streamed = reply(kept, streams=True)
    client.read(streamed.opening())
    client.read(streamed.frames(0, TokenDelta(finish_reason=FinishReason.STOP)))
    client.read(streamed.closing())
    [item] = client.response["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_a_failure_keeps_what_there_was() -> None:
    kept: list[Any] = []
    client = Reader()
    streamed = reply(kept, streams=True)
    client.read(streamed.opening())
    deltas = deltas_of("<think>a</think>bc", FinishReason.STOP)
    client.read(streamed.frames(0, merged(deltas[:-1])))
    failed = streamed.failure(KeyError("inside"))
    client.read(failed)
    response = client.response
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert b"inside" not in failed
    assert [item["done"] for item in client.items] == response["output"]
    assert [item["content"][0]["text"] for item in response["output"]] == ["a", "b"]
    assert kept == [response]
