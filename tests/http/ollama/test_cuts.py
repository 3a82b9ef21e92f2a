"""However the tokens of an answer are cut into lines, the lines add up to the same message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.ollama.reply import OllamaReply, chat_answer
from asyncllm.types import FinishReason, SamplingParams
from tests.http.openai.test_chat_cuts import READER, TEXTS, TOKENIZER, TOOLS, deltas_of, merged


def reply(*, scored: bool) -> OllamaReply:
    reader = Conversation([1], SamplingParams(), READER, TOOLS, "").message_reader()
    tokenizer = TOKENIZER if scored else None
    return OllamaReply("m", reader, chat_answer, prompt_tokens=1, began=0, tokenizer=tokenizer)


def add_up(lines: bytes) -> dict[str, Any]:
    """What a client makes of a stream's lines."""
    whole: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": [], "logprobs": []}
    for line in lines.splitlines():
        body = json.loads(line)
        message = body["message"]
        whole["content"] += message["content"]
        whole["thinking"] += message.get("thinking", "")
        whole["tool_calls"] += message.get("tool_calls", ())
        whole["logprobs"] += body.get("logprobs", ())
        whole["done_reason"] = body.get("done_reason")
    for call in whole["tool_calls"]:
        del call["id"]  # each parser makes up its own
    return whole


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@given(data=st.data())
@settings(max_examples=40)
def test_any_cut_gives_the_same_message(text: str, scored: bool, data: st.DataObject) -> None:
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    deltas = deltas_of(text, finish)
    cuts = data.draw(st.lists(st.integers(1, len(deltas) - 1), unique=True).map(sorted))
    streamed, whole = reply(scored=scored), reply(scored=scored)
    lines = b""
    for start, end in zip([0, *cuts], [*cuts, len(deltas)], strict=True):
        lines += streamed.frames(0, merged(deltas[start:end]))
    lines += streamed.closing()
    assert add_up(lines) == add_up(whole.body([merged(deltas)]))


def test_a_call_that_was_cut_off_is_left_out() -> None:
    [text] = [text for text in TEXTS if text.endswith('\\u00e9"}')]
    body = json.loads(reply(scored=False).body([merged(deltas_of(text, FinishReason.LENGTH))]))
    assert body["message"] == {"role": "assistant", "content": ""}
    assert body["done_reason"] == "length"
