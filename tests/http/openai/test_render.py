"""POST /v1/chat/completions/render: the prompt of a chat, without the chat."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.server.fake_llm import MAX_LEN
from tests.support.server.openapi import CHAT, RENDER, USER
from tests.support.server.serving import Server

BODIES: list[dict[str, Any]] = [
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"n": 3, "temperature": 0, "logprobs": True},
    {"add_generation_prompt": False},
    {"truncate_prompt_tokens": 5},
    {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    {"messages": [USER, {"role": "assistant", "content": "So"}], "continue_final_message": True},
]


@pytest.mark.parametrize("fields", BODIES, ids=str)
def test_it_is_what_the_chat_sends(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": [USER], **fields}
    before = len(server.llm.params)
    rendered = server.post(RENDER, body)
    assert rendered.status == 200, rendered.body
    assert len(server.llm.params) == before, "something was generated"
    whole = body | {"stream": False, "stream_options": None, "return_token_ids": True}
    sent = server.post(CHAT, whole | {"return_prompt_text": True}).json
    assert rendered.json == {
        "prompt": sent["prompt_text"],
        "token_ids": sent["prompt_token_ids"],
        "count": len(sent["prompt_token_ids"]),
    }


def test_it_reads_as_text(server: Server) -> None:
    answer = server.post(RENDER, {"messages": [USER]}).json
    assert answer["prompt"] == "user: aé\nassistant: "
    assert answer["token_ids"] == list(answer["prompt"].encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a" * MAX_LEN}]},
        {"messages": [{"role": "user"}]},
        {"max_completion_tokens": MAX_LEN},
        {"top_logprobs": 1},
        {"tool_choice": "required"},
        {"temperature": -1},
        {"response_format": {"type": "json_schema"}},
        {"echo": True},
        {"suffix": "x"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_no_chat_is_refused_alike(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": [USER], **fields}
    rendered, chat = server.post(RENDER, body), server.post(CHAT, body)
    assert rendered.status == chat.status
    assert 400 <= rendered.status < 500
    # The message is the engine's, which for the fake is another.
    for name in ("type", "param", "code"):
        assert rendered.json["error"][name] == chat.json["error"][name]
