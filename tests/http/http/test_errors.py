"""Bad requests: OpenAI's error body with the offending param, and nothing for the engine."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import EngineDead, StepError
from tests.support.server.serving import Answer, Server, serving

USER = {"role": "user", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    """OpenAI's choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def check(answer: Answer, status: int, param: str | None = None, code: str | None = None) -> None:
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (status, param, code), error
    assert answer.json.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Request-Id"]


BOTH: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"model": 1}, 400, "model", None),
    ({"max_tokens": -1}, 400, "max_tokens", None),
    ({"max_tokens": "5"}, 400, "max_tokens", None),
    ({"temperature": -1}, 400, "temperature", None),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"repetition_penalty": 5e-324}, 400, "repetition_penalty", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"top_k": 1.5}, 400, "top_k", None),
    ({"n": 0}, 400, "n", None),
    ({"n": 129}, 400, "n", None),
    ({"n": 17}, 400, "n", None),
    ({"n": True}, 400, "n", None),
    ({"seed": 2**64}, 400, "seed", None),
    ({"seed": 2**63}, 400, "seed", None),
    ({"stop": [""]}, 400, "stop", None),
    ({"stop": ["a"] * 33}, 400, "stop", None),
    ({"stop": ["a", 1]}, 400, "stop[1]", None),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids[0]", None),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", None),
    ({"stream": "yes"}, 400, "stream", None),
    ({"best_of": 0}, 400, "best_of", None),
    ({"best_of": 17}, 400, "best_of", None),
    ({"best_of": 1, "n": 2}, 400, "best_of", None),
    ({"best_of": 3, "stream": True}, 400, "best_of", None),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", None),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", None),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", None),
    ({"guided_json": 1}, 400, "guided_json", None),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, 400, "structured_outputs.regex", None),
    ({"use_beam_search": True, "temperature": 1}, 400, "temperature", None),
    ({"use_beam_search": True, "stop": "a"}, 400, "stop", None),
    ({"use_beam_search": True, "presence_penalty": 1}, 400, "presence_penalty", None),
    ({"use_beam_search": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", None),
    ({"use_beam_search": True, "early_stopping": "soon"}, 400, "early_stopping", None),
    ({"length_penalty": 2}, 400, "length_penalty", None),
    ({"early_stopping": True}, 400, "early_stopping", None),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs", None),
    ({"prompt_logprobs": -1}, 400, "prompt_logprobs", None),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", None),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", None),
    ({"truncation_side": "left"}, 400, "truncation_side", None),
]

CHAT: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": []}, 400, "messages", None),
    ({"messages": "hello"}, 400, "messages", None),
    ({"messages": [1]}, 400, "messages[0]", None),
    ({"messages": [USER, {"role": "king", "content": "a"}]}, 400, "messages[1].role", None),
    ({"messages": [{"content": "a"}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": ["user"], "content": [1]}]}, 400, "messages[0].role", None),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "messages[0].content",
        None,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0].content[0].text",
        None,
    ),
    ({"max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 5000}, 400, "max_completion_tokens", "context_length_exceeded"),
    (
        {"messages": [{"role": "user", "content": "a" * 5000}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    ({"max_tokens": 0}, 400, "max_tokens", None),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", None),
    ({"top_logprobs": 2}, 400, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", None),
    ({"logprobs": 1}, 400, "logprobs", None),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", None),
    ({"tool_choice": "required"}, 400, "tool_choice", None),
    ({"tool_choice": "required", "tools": []}, 400, "tool_choice", None),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, 400, "tool_choice", None),
    ({"tool_choice": {"type": "any"}, "tools": []}, 400, "tool_choice", None),
    ({"tool_choice": {"type": "function"}}, 400, "tool_choice", None),
    ({"tool_choice": "maybe", "tools": TOOLS}, 400, "tool_choice", None),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, 400, "tool_choice", None),
    ({"tool_choice": allowing(), "tools": TOOLS}, 400, "tool_choice", None),
    ({"tool_choice": allowing("nobody"), "tools": TOOLS}, 400, "tool_choice", None),
    ({"tool_choice": allowing("now", mode="none"), "tools": TOOLS}, 400, "tool_choice", None),
    ({"tool_choice": allowing("now")}, 400, "tool_choice", None),
    ({"reasoning_effort": "bogus"}, 400, "reasoning_effort", None),
    ({"tool_choice": 1, "tools": TOOLS}, 400, "tool_choice", None),
    ({"structured_outputs": {}}, 400, "structured_outputs", None),
    ({"structured_outputs": {"choice": None}}, 400, "structured_outputs", None),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", None),
    ({"chat_template": "x"}, 400, "chat_template", "unsupported_parameter"),
    ({"echo": True}, 400, "echo", "unsupported_parameter"),
    ({"audio": {"voice": "x", "format": "wav"}}, 400, "audio", "unsupported_parameter"),
]

COMPLETIONS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"prompt": None}, 400, "prompt", None),
    ({"prompt": ""}, 400, "prompt", None),
    ({"prompt": []}, 400, "prompt", None),
    ({"prompt": [""]}, 400, "prompt", None),
    ({"prompt": [[]]}, 400, "prompt", None),
    ({"prompt": [1, "a"]}, 400, "prompt", None),
    ({"prompt": [1, [2]]}, 400, "prompt", None),
    ({"prompt": [1, -2]}, 400, "prompt[1]", None),
    ({"prompt": [[1, "a"]]}, 400, "prompt[0][1]", None),
    ({"prompt": [1.5]}, 400, "prompt[0]", None),
    ({"prompt": [99999]}, 400, "prompt", None),
    ({"prompt": ["a"] * 17}, 400, "prompt", None),
    ({"prompt": "a" * 5000}, 400, "prompt", "context_length_exceeded"),
    ({"max_tokens": 5000}, 400, "max_tokens", "context_length_exceeded"),
    ({"logprobs": 21}, 400, "logprobs", None),
    ({"logprobs": True}, 400, "logprobs", None),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
]

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"prompt": "a"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "case"),
    [
        *(("/v1/chat/completions", case) for case in BOTH + CHAT),
        *(("/v1/completions", case) for case in BOTH + COMPLETIONS),
    ],
    ids=str,
)
def test_bad_fields(server: Server, path: str, case: Any, stream: bool) -> None:
    fields, status, param, code = case
    before = len(server.llm.params)
    answer = server.post(path, ROUTES[path] | {"stream": stream} | fields)
    check(answer, status, param, code)
    assert len(server.llm.params) == before


HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "unknown": [1, {"a": None}],
    "response_format": {"type": "text"},
    "logit_bias": {},
    "temperature": None,
    "max_tokens": None,
    "stop": None,
    "stream": None,
    "stream_options": None,
    "n": None,
}


@pytest.mark.parametrize("path", ROUTES)
def test_harmless_fields(server: Server, path: str) -> None:
    assert server.post(path, ROUTES[path] | HARMLESS).status == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "a"} x',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xff", "messages": []}',
        b'{"unknown": "\xff"}',
        b'{"prompt": "\\ud800", "messages": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"unknown": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"chat_template_kwargs": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        bytes(range(256)),
    ],
    ids=lambda body: str(body[:30]),
)
def test_bad_bodies(server: Server, path: str, body: bytes) -> None:
    answer = server.post(path, body, {"Content-Type": "application/json; charset=latin-1"})
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ROUTES)
def test_integers_written_as_floats(server: Server, path: str) -> None:
    assert server.post(path, ROUTES[path] | {"max_tokens": 2.0, "seed": 1e3}).status == 200
    params = server.llm.params[-1]
    assert (params.max_tokens, params.seed) == (2, 1000)
    check(server.post(path, ROUTES[path] | {"seed": 1.0, "max_tokens": 2.5}), 400, "max_tokens")
    check(server.post(path, ROUTES[path] | {"max_tokens": "2"}), 400, "max_tokens")


def test_content_type_does_not_matter(server: Server) -> None:
    for kind in ("text/plain", "application/json; charset=utf-16", "application/x-www-form"):
        answer = server.post("/v1/completions", {"prompt": "é"}, {"Content-Type": kind})
        assert answer.json["choices"][0]["text"] == "é"


def test_broken_gzip(server: Server) -> None:
    answer = server.post("/generate", b"not gzip", {"Content-Encoding": "gzip"})
    check(answer, 400)


def test_unknown_routes(server: Server) -> None:
    check(server.get("/nothing"), 404)
    check(server.post("/v1/unknown/%ff", {}), 404)
    answer = server.get("/v1/completions")
    check(answer, 405)
    assert answer.headers["Allow"] == "POST"
    check(server.get("/v1/models/other"), 404, "model", "model_not_found")


@pytest.mark.parametrize("prefix", ["", "/deep/down"])
def test_unknown_routes_of_other_apis_answer_in_their_format(prefix: str) -> None:
    with serving(prefix=prefix) as mounted:
        for method, path, status in (
            ("GET", "/v1/messages", 405),
            ("PUT", "/v1/messages/count_tokens", 405),
            ("POST", "/v1/messages/batches", 404),
        ):
            answer = mounted.request(method, path, {} if method == "POST" else None)
            body = answer.json
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)
            assert answer.headers.get("Allow") == (None if status == 404 else "POST")
        for method, path, status in (
            ("GET", "/api/chat", 405),
            ("DELETE", "/api/delete", 404),
            ("GET", "/api", 404),
        ):
            answer = mounted.request(method, path)
            assert answer.status == status
            assert list(answer.json) == ["error"]
            assert isinstance(answer.json["error"], str)
        for path in ("/v1/messages_", "/apis", "/v1/api"):
            check(mounted.get(path), 404)


def test_body_too_large() -> None:
    with serving(config=ServerConfig(max_body_bytes=1000)) as server:
        check(server.post("/generate", {"prompt": "a" * 1000}), 413)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head + (b"100\r\n" + b"a" * 256 + b"\r\n") * 4)
            assert client.recv(100).startswith(b"HTTP/1.1 413")
        assert server.post("/generate", {"prompt": "a" * 900}).status == 200
    # aiohttp's own default of 1 MiB does not apply.
    with serving() as server:
        body = {"prompt": "a", "unknown": "x" * 2_000_000}
        assert server.post("/generate", body).status == 200


def test_queue_full(server: Server) -> None:
    server.call(server.llm.hold)
    clients = [server.open("/generate", {"prompt": "a"}) for _ in range(16)]
    server.until(lambda: server.llm.stats.waiting == 16)
    answer = server.post("/generate", {"prompt": "a", "stream": True})
    assert answer.json["error"]["type"] == "rate_limit_error"
    assert answer.json["error"]["code"] == "queue_full"
    assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
    assert answer.headers["x-should-retry"] == "true"
    # A request that is refused half-way takes back what it had submitted.
    clients.pop().close()
    server.until(lambda: server.llm.stats.waiting == 15)
    assert server.post("/v1/completions", {"prompt": "a", "n": 2}).status == 429
    assert server.call(lambda: server.llm.stats.waiting) == 15
    server.call(server.llm.resume)
    for client in clients:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()


@pytest.mark.parametrize("path", ROUTES)
def test_failing_step(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "fail", StepError("the step failed"))
    check(server.post(path, ROUTES[path]), 500, None, StepError.code)
    streamed = server.post(path, ROUTES[path] | {"stream": True})
    assert streamed.status == 200
    assert streamed.frames[-1]["error"]["message"] == "the step failed"


def test_bug_in_delivery(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble with formatting ends that request with a 500 and tells nothing about our insides."""

    def broken(token_id: int) -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(server.llm.tokenizer, "token_bytes", broken)
    body = {"prompt": "a", "logprobs": 1}
    answer = server.post("/v1/completions", body)
    check(answer, 500)
    assert b"secret" not in answer.body
    streamed = server.post("/v1/completions", {**body, "stream": True})
    assert streamed.frames == [answer.json]


def test_not_ready(server: Server) -> None:
    def become(ready: bool, healthy: bool) -> None:
        server.llm.ready, server.llm.healthy = ready, healthy

    paths = [*ROUTES, "/tokenize", "/detokenize"]
    server.call(lambda: become(False, True))
    for path in paths:
        answer = server.post(path, ROUTES.get(path, {}))
        check(answer, 503, None, "not_ready")
        assert answer.headers["Retry-After"] == "1"
    check(server.get("/v1/models"), 503, None, "not_ready")
    check(server.get("/ready"), 503, None, "not_ready")
    assert server.get("/health").status == 200
    assert b"asyncllm_ready 0.0" in server.get("/metrics").body
    server.call(lambda: become(False, False))
    check(server.post("/generate", {"prompt": "a"}), 503, None, EngineDead.code)
    dead = server.get("/health")
    assert (dead.status, dead.json["status"]) == (503, "dead")
    assert dead.json["error"]["code"] == EngineDead.code
    server.call(lambda: become(True, True))
    assert server.get("/ready").status == 200


def test_no_chat_template() -> None:
    with serving() as server:
        server.call(lambda: setattr(server.llm, "chat_template", None))
        check(server.post("/v1/chat/completions", {"messages": [USER]}), 400, "messages")


def test_error_bodies_are_json_numbers(server: Server) -> None:
    """Every number in an answer is JSON: no NaN, no infinity."""
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 5}

    def refuse(name: str) -> None:
        raise AssertionError(name)

    raw = server.post("/v1/chat/completions", body).body
    json.loads(raw, parse_constant=refuse)


@pytest.mark.parametrize("half", ["\\ud800", "\\uDBFF\\n", "\\udc00", "\\ud83d\\u0041"])
def test_a_lone_surrogate_is_named(server: Server, half: str) -> None:
    body = '{"prompt": "\\\\ud800 \\ud83d\\ude00 é %s"}' % half  # noqa: UP031
    message = server.post("/generate", body.encode()).json["error"]["message"]
    at = body.encode().index(half.encode(), 30)
    assert message == (
        f"the body is not valid JSON: the surrogate {half[:6]} at byte {at} is half of a pair"
    )


def test_tokenize_takes_one_of_two(server: Server) -> None:
    both = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    check(server.post("/tokenize", both), 400, "messages")
    assert server.post("/tokenize", both | {"prompt": None}).status == 200


NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None, "tool_choice": None},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none"},
    {"tool_choice": {"type": "auto"}},
    {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    {"reasoning_effort": "default"},
    {"reasoning_effort": "auto"},
    {"reasoning_effort": ""},
    {"stop": []},
    {"top_logprobs": 0, "logprobs": False},
    {"max_completion_tokens": None},
]


@pytest.mark.parametrize("fields", NOTHING, ids=str)
def test_values_that_ask_for_nothing(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [USER], **fields})
    assert answer.status == 200, answer.body
    assert "X-Ignored-Parameters" not in answer.headers
    template = server.llm.chat_template
    assert template is not None
    _, options = template.seen
    assert options["tools"] is None
    assert "reasoning_effort" not in options


def test_reasoning_efforts(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "bogus"}
    error = server.post("/v1/chat/completions", chat).json["error"]
    assert "none, minimal, low, medium, high" in error["message"]
    response = {"input": "a", "reasoning": {"effort": "bogus"}}
    check(server.post("/v1/responses", response), 400, "reasoning.effort")
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", {"effort": "low"}):
        answer = server.post("/v1/chat/completions", chat | {"reasoning_effort": effort})
        assert answer.status == 200
