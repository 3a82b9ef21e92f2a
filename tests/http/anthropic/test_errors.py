"""What /v1/messages refuses, and how it fails: in Anthropic's words."""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import StepError
from tests.http.anthropic.test_anthropic import HI, MESSAGES, TOOLS
from tests.http.responses.test_responses import make_llm
from tests.support.server.fake_llm import MAX_LEN
from tests.support.server.serving import Server, serving


def block(**fields: Any) -> Any:
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * MAX_LEN}]}, "prompt is too long: "),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages has no content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": block(type="image")}, "messages[0].content[0]"),
        ({"messages": block(type="text")}, "messages[0].content[0]: text is required"),
        ({"messages": block(type="tool_use", id="a", name="b", input={})}, "role user"),
        ({"messages": block(text="a")}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            "must end with",
        ),
        ({"tools": [{"name": "add"}]}, "tools[0]: input_schema is required"),
        ({"tools": [{"type": "function"}]}, "tools[0]: function is required"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "of tomorrow"}}, "auto, any, tool or none"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no such tool"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
    ids=str,
)
def test_refusals(server: Server, fields: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        body = {"messages": HI, "max_tokens": 9, "stream": stream} | fields
        answer = server.post(MESSAGES, body)
        assert answer.status == 400, answer.body
        error = answer.json["error"]
        assert (answer.json["type"], error["type"]) == ("error", "invalid_request_error")
        assert message in error["message"]


def test_errors_are_anthropics(client: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude", max_tokens=9, messages=HI)
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=HI)
    answer = server.post(MESSAGES, b"{", {"X-Request-Id": "mine"})
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.json["request_id"] == answer.headers["request-id"] == "mine"


def test_a_full_queue(client: anthropic.Anthropic, server: Server) -> None:
    limits = server.llm.limits
    server.llm.limits = msgspec.structs.replace(limits, max_waiting=0)
    try:
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(model="fake", max_tokens=9, messages=HI)
    finally:
        server.llm.limits = limits
    assert caught.value.type == "rate_limit_error"
    assert caught.value.response.headers["retry-after"]


def test_a_server_that_loads(client: anthropic.Anthropic, server: Server) -> None:
    server.llm.ready = False
    try:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(model="fake", max_tokens=9, messages=HI)
    finally:
        server.llm.ready = True
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")


def test_failing(
    server: Server, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm, "fail", StepError("planted"))
    with pytest.raises(anthropic.InternalServerError, match="planted") as caught:
        client.messages.create(model="fake", max_tokens=9, messages=HI)
    assert caught.value.type == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="planted") as caught_later:
        for _ in client.messages.create(model="fake", max_tokens=9, messages=HI, stream=True):
            pass
    assert caught_later.value.type == "api_error"


def test_keys() -> None:
    with serving(make_llm, ServerConfig(api_key=("secret",))) as guarded:
        with anthropic.Anthropic(base_url=guarded.url, api_key="secret", max_retries=0) as client:
            assert client.messages.create(model="fake", max_tokens=9, messages=HI).content
        with (
            anthropic.Anthropic(base_url=guarded.url, api_key="other", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(model="fake", max_tokens=9, messages=HI)
    assert caught.value.type == "authentication_error"
