"""Limits of each API key, over all routes that generate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI, RateLimitError

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest, StepError
from asyncllm.server.limits.accounts import Rates
from asyncllm.server.limits.api_keys import configured_keys
from tests.support.server.serving import Answer, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES = [{"role": "user", "content": "abc"}]
#: Prompt "user: abc\nassistant: " of 21 tokens; all of it is echoed, and an end token.
PROMPT, ANSWER = 21, 22
LIMIT = 100_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """``one`` has the common limits, ``two`` its own, ``three`` none."""
    file = tmp_path / "keys"
    file.write_text(
        "one\n\ntwo  tokens-per-minute=300 requests-per-minute=4\n"
        "three requests-per-minute=unlimited tokens-per-minute=unlimited\n"
    )
    config = ServerConfig(
        api_key_file=str(file), requests_per_minute=50, tokens_per_minute=LIMIT, cors_origin=("*",)
    )
    with serving(config=config) as running:
        yield running
        running.call(running.llm.resume)
        running.until_idle()


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def chat(server: Server, name: str, **fields: Any) -> Answer:
    body = {"messages": MESSAGES, "max_tokens": 50, **fields}
    return server.post("/v1/chat/completions", body, key(name))


def left(server: Server, name: str) -> int:
    """The tokens that a key has left."""
    answer = server.post("/v1/chat/completions/render", {"messages": MESSAGES}, key(name))
    return int(answer.headers["x-ratelimit-remaining-tokens"])


#: Path, body and the tokens of its usage, for each kind of answer.
ROUTES: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, PROMPT + ANSWER),
    "chats": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, PROMPT + 3 * ANSWER),
    "completions": ("/v1/completions", {"prompt": ["abc", "d"], "max_tokens": 9}, 6 + 6),
    "beams": ("/v1/completions", {"prompt": "abc", "use_beam_search": True, "n": 2}, 4 + 8),
    "embeddings": ("/v1/embeddings", {"input": ["abc", "de"]}, 7),
    "responses": ("/v1/responses", {"input": "abc"}, PROMPT + ANSWER),
    "messages": ("/v1/messages", {"messages": MESSAGES, "model": "fake", "max_tokens": 99},
                 PROMPT + ANSWER),
    "ollama": ("/api/chat", {"messages": MESSAGES, "model": "fake"}, PROMPT + ANSWER),
    "ollama embed": ("/api/embed", {"input": "abc", "model": "fake"}, 4),
    "native": ("/generate", {"prompt": "abc"}, 4 + 4),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_each_route_pays_for_its_usage(server: Server, name: str) -> None:
    path, body, used = ROUTES[name]
    answer = server.post(path, body, key("one"))
    assert answer.status == 200, answer.body
    prefix = "anthropic-ratelimit-tokens-" if name == "messages" else "x-ratelimit-"
    limit = f"{prefix}limit" if name == "messages" else f"{prefix}limit-tokens"
    assert answer.headers[limit] == str(LIMIT)
    spent = LIMIT - left(server, "one")
    assert used - 100 <= spent <= used  # it refills all the time
    if "stream" not in body and name in ("chat", "responses", "messages", "ollama", "native"):
        streamed = server.post(path, {**body, "stream": True}, key("one"))
        assert limit in streamed.headers
        assert LIMIT - left(server, "one") <= 2 * used


def test_a_request_is_refused_when_tokens_run_out(server: Server) -> None:
    first = chat(server, "two", max_tokens=250)
    assert first.status == 200
    # What was not used is free again: this one fits.
    assert chat(server, "two", max_tokens=200).status == 200
    refused = chat(server, "two", max_tokens=270)
    assert refused.status == 429
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert "tokens per minute: the limit is 300" in refused.json["error"]["message"]
    wait = int(refused.headers["Retry-After"])
    assert 0 < wait <= 60
    assert refused.headers["x-should-retry"] == "true"
    assert refused.headers["x-ratelimit-limit-tokens"] == "300"
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 270 + PROMPT
    # Other keys do not notice.
    assert chat(server, "one").status == chat(server, "three").status == 200


def test_reservations_of_running_requests_count(server: Server) -> None:
    server.call(server.llm.hold)
    with server.open(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 200},
        extra="Authorization: Bearer two\r\n",
    ):
        server.until(lambda: server.llm.stats.waiting == 1)
        assert chat(server, "two", max_tokens=100).status == 429
    server.until_idle()  # its client has left: it pays for its prompt only
    server.call(server.llm.resume)
    assert left(server, "two") >= 300 - PROMPT
    assert chat(server, "two", max_tokens=200).status == 200


def test_a_request_is_refused_when_requests_run_out(server: Server) -> None:
    for remaining in (3, 2, 1, 0):
        answer = chat(server, "two", max_tokens=1)
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == str(remaining)
    refused = chat(server, "two", max_tokens=1)
    assert refused.status == 429
    assert "requests per minute: the limit is 4" in refused.json["error"]["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    message = server.post("/v1/messages", ROUTES["messages"][1], key("two"))
    assert message.status == 429
    assert message.json["error"]["type"] == "rate_limit_error"
    assert message.headers["anthropic-ratelimit-requests-remaining"] == "0"
    # Routes that generate nothing are not limited.
    assert server.get("/v1/models", key("two")).status == 200


def test_without_limits_there_are_no_headers(server: Server) -> None:
    answer = chat(server, "three")
    assert not [name for name in answer.headers if "ratelimit" in name.lower()]


def test_requests_that_fail_pay_for_what_they_used(server: Server) -> None:
    too_long = chat(server, "two", max_tokens=100_000)
    assert too_long.status == 400
    assert left(server, "two") == 300
    server.llm.fail = StepError("planted")
    assert chat(server, "two").status == 500
    server.llm.fail = None
    assert 300 - PROMPT <= left(server, "two") < 300


def test_browsers_may_read_the_headers(server: Server) -> None:
    body = {"messages": MESSAGES}
    headers = {**key("one"), "Origin": "https://a.example"}
    answer = server.post("/v1/chat/completions", body, headers)
    assert "x-ratelimit-remaining-tokens" in answer.headers["Access-Control-Expose-Headers"]


def test_without_keys_all_clients_share_the_limits() -> None:
    config = ServerConfig(requests_per_minute=1)
    with serving(config=config) as server:
        client = OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0)
        client.completions.create(model="fake", prompt="abc")
        with pytest.raises(RateLimitError, match="requests per minute"):
            client.completions.create(model="fake", prompt="abc")
        client.close()


def test_a_refused_background_response(server: Server) -> None:
    body = {"input": "abc", "background": True, "max_output_tokens": 200}
    assert server.post("/v1/responses", body, key("two")).status == 200
    server.until_idle()
    again = {**body, "max_output_tokens": 290}
    assert server.post("/v1/responses", again, key("two")).status == 429


@pytest.mark.parametrize(
    "line",
    ["hidden requests-per-minute=0", "hidden tokens-per-minute=x", "hidden other=1", "a hidden",
     "hidden =", "hidden tokens-per-minute=-1", "hidden tokens-per-minute=²"],
)  # fmt: skip
def test_a_malformed_line_of_the_key_file(tmp_path: Path, line: str) -> None:
    file = tmp_path.with_name("keys")  # the folder is named after this test
    file.write_text(f"one\n{line}\n")
    with pytest.raises(BadRequest, match=r"line 2 of .*tokens-per-minute=N") as caught:
        configured_keys(ServerConfig(api_key_file=str(file)))
    assert caught.value.param == "api_key_file"
    assert "hidden" not in caught.value.message  # no key is shown, nor what may be one


def test_keys_of_a_file_without_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(" one \n\ntwo\n")
    keys = configured_keys(ServerConfig(api_key=("a b",), api_key_file=str(file)))
    assert [(found.text, found.rates) for found in keys] == [
        ("a b", Rates()),
        ("one", Rates()),
        ("two", Rates()),
    ]


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
def test_limits_are_positive(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(BadRequest) as caught:
        ServerConfig(**options)
    assert caught.value.param == name


def test_streams_have_the_headers_at_their_beginning(server: Server) -> None:
    answer = chat(server, "one", stream=True)
    assert answer.headers["x-ratelimit-remaining-requests"] == "49"
    # The reservation is still held when the headers are written.
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= LIMIT - PROMPT - ANSWER
    assert json.loads(answer.body.split(b"\n\n")[0][6:])["object"] == "chat.completion.chunk"
