"""Reasoning of a model whose tokenizer has no tokens for its markers: the built-in one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from tests.support.server.serving import Server

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def post(demo: Server, path: str, body: dict[str, Any]) -> requests.Response:
    answer = requests.post(demo.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def asked(begun: str, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "Count from 1 to 50."},
        {"role": "assistant", "content": begun},
    ]
    return {"messages": messages, "continue_final_message": True, "temperature": 0, **fields}


@pytest.mark.parametrize("begun", ["<think>\n", "<think>\n1, 2,"])
@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_ends_it(demo: Server, begun: str, budget: int) -> None:
    body = asked(begun, thinking_token_budget=budget, max_tokens=30)
    whole = post(demo, CHAT, body).json()
    [choice] = whole["choices"]
    marker = len(post(demo, "/tokenize", {"prompt": "</think>"}).json()["tokens"])
    assert marker > 1
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == budget + marker
    assert "<" not in choice["message"].get("reasoning", "")
    assert bool(choice["message"].get("reasoning")) == (budget > 0)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, done, _ = post(demo, CHAT, body | options).text.split("\n\n")
    assert done == "data: [DONE]"
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"] == details


def test_the_grammar_begins_behind_it(demo: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    fields: dict[str, Any] = {"response_format": form, "max_tokens": 200, "seed": 1}
    body = asked("<think>\n", thinking_token_budget=5, **fields)
    [choice] = post(demo, CHAT, body).json()["choices"]
    assert choice["message"]["reasoning"]
    assert json.loads(choice["message"]["content"]).keys() >= {"a"}
    # Ended by the message's own beginning, or not begun at all: there is nothing but the grammar.
    for begun in ("<think>\nHm.</think>\n\n", "\n"):
        [choice] = post(demo, CHAT, asked(begun, **fields)).json()["choices"]
        assert "reasoning" not in choice["message"]
        assert json.loads(choice["message"]["content"]).keys() >= {"a"}
