"""A prompt that is too long, in the words that each API's clients look for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.engine.requests.check import check_request
from asyncllm.errors import ContextLengthExceeded
from asyncllm.types import SamplingParams
from tests.support.engine.scheduling import limits
from tests.support.server.fake_llm import MAX_LEN

if TYPE_CHECKING:
    from tests.support.server.serving import Server

KNOWN = f"This model's maximum context length is {MAX_LEN} tokens"
REDUCE = "Please reduce the length of the messages."


def chat(length: int, **fields: Any) -> dict[str, Any]:
    """The template makes 18 tokens around the text."""
    return {"messages": [{"role": "user", "content": "a" * (length - 18)}], **fields}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "/v1/chat/completions",
            chat(5000),
            "messages",
            f"{KNOWN}. However, your messages resulted in at least 5000 tokens. {REDUCE}",
        ),
        (
            "/v1/chat/completions",
            chat(100, max_tokens=4000),
            "max_tokens",
            f"{KNOWN}. However, you requested 4100 tokens (100 in the messages, 4000 in the "
            "completion). Please reduce the length of the messages or completion.",
        ),
        (
            "/v1/completions",
            {"prompt": [97] * 5000},
            "prompt",
            f"{KNOWN}, however you requested 5016 tokens (5000 in your prompt; 16 for the "
            "completion). Please reduce your prompt; or completion length.",
        ),
        (
            "/v1/completions",
            {"prompt": [97] * 4090},
            "max_tokens",
            f"{KNOWN}, however you requested 4106 tokens (4090 in your prompt; 16 for the "
            "completion). Please reduce your prompt; or completion length.",
        ),
        (
            "/v1/completions",
            {"prompt": "a" * 5000},
            "prompt",
            f"{KNOWN}, however you requested at least 5000 tokens (5000 in your prompt; 0 for "
            "the completion). Please reduce your prompt; or completion length.",
        ),
        (
            "/v1/embeddings",
            {"input": [97] * 5000},
            "input",
            f"{KNOWN}, however you requested 5000 tokens (5000 in your prompt; 0 for the "
            "completion). Please reduce your prompt; or completion length.",
        ),
        (
            "/generate",
            {"prompt": [97] * MAX_LEN},
            "prompt",
            f"{KNOWN}, however you requested {MAX_LEN + 1} tokens ({MAX_LEN} in your prompt; 1 "
            "for the completion). Please reduce your prompt; or completion length.",
        ),
        (
            "/v1/responses",
            {"input": "a" * 4982},
            "input",
            f"{KNOWN}. However, your messages resulted in at least 5000 tokens. {REDUCE}",
        ),
    ],
)
def test_openai(server: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post(path, body)
    assert answer.status == 400
    assert answer.json["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("length", [MAX_LEN, 5000])
def test_anthropic(server: Server, length: int) -> None:
    answer = server.post("/v1/messages", chat(length, max_tokens=10))
    assert answer.status == 400
    assert answer.json["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: at least {length} tokens > {MAX_LEN} maximum"
        if length > MAX_LEN
        else f"prompt is too long: {length} tokens > {MAX_LEN - 1} maximum",
    }


def test_ollama(server: Server) -> None:
    answer = server.post("/api/chat", chat(5000, model="fake"))
    assert answer.status == 400
    assert answer.json["error"].startswith(f"{KNOWN}. However, your messages resulted in")
    answer = server.post("/api/generate", {"model": "fake", "prompt": "a" * 5000, "raw": True})
    assert answer.json["error"].startswith(f"{KNOWN}, however you requested")


def test_the_engine() -> None:
    bounds = limits(max_model_len=10)
    with pytest.raises(
        ContextLengthExceeded, match=r"10 tokens, however you requested 11"
    ) as found:
        check_request([1] * 10, SamplingParams(), bounds)
    assert str(found.value) == found.value.message
    assert check_request([1] * 10, SamplingParams(max_tokens=0), bounds).max_length == 10


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_clients_may_ask_for_more_than_fits(server: Server, stream: bool) -> None:
    """As Claude Code does, which sends the same max_tokens with every request."""
    body = chat(100, max_tokens=32_000, ignore_eos=True, stream=stream)
    answer = server.post("/v1/messages", body)
    assert answer.status == 200
    made = server.call(lambda: server.llm.params[-1])
    assert made.max_tokens == MAX_LEN - 100
    if stream:
        [end] = [event for event in answer.events if event["type"] == "message_delta"]
        assert end["delta"]["stop_reason"] == "model_context_window_exceeded"
    else:
        assert answer.json["stop_reason"] == "model_context_window_exceeded"
        assert answer.json["usage"]["output_tokens"] == MAX_LEN - 100
