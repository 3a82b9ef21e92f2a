"""HTTP around the routes: keys, methods, headers; and what official clients make of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest, DeadlineExceeded, NotReady, QueueFull, StepError
from asyncllm.server.app import create_app
from tests.http.http.test_errors import check
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving


def test_request_id(server: Server) -> None:
    assert server.get("/version", {"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    for bad in ("a b", "x" * 200, ""):
        given = server.get("/version", {"X-Request-Id": bad}).headers["X-Request-Id"]
        assert given != bad
        assert len(given) == 32
    assert server.get("/nothing", {"X-Request-Id": "n"}).headers["X-Request-Id"] == "n"


def test_api_key() -> None:
    config = ServerConfig(api_key=("secret", "sécond"))
    with serving(config=config) as server:
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            check(server.get(path), 401, None, "invalid_api_key")
        for header in ("Bearer wrong", "secret", "Basic secret", "Bearer", "Bearer secret2"):
            check(server.get("/version", {"Authorization": header}), 401, None, "invalid_api_key")
        assert server.get("/health").status == server.get("/ready").status == 200
        assert server.get("/version", {"Authorization": "Bearer secret"}).status == 200
        second = "Bearer sécond".encode().decode("latin-1")
        assert server.get("/version", {"Authorization": second}).status == 200
        answer = server.post("/generate", {"prompt": "a"})
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_api_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n  first \n\nsécond\n", encoding="utf-8")
    with serving(config=ServerConfig(api_key=("given",), api_key_file=str(file))) as server:
        for key in ("given", "first", "sécond"):
            header = f"Bearer {key}".encode().decode("latin-1")
            assert server.get("/version", {"Authorization": header}).status == 200
            assert server.get("/version", {"x-api-key": header[7:]}).status == 200
        for key in ("", "firs", "first ", "keys", "given,first"):
            expected = 200 if key.strip() == "first" else 401
            answer = server.get("/version", {"Authorization": f"Bearer {key}"})
            assert answer.status == expected


def test_a_key_file_that_leaves_the_server_open(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n \n")
    for path, error in ((file, BadRequest), (tmp_path / "none", OSError)):
        with pytest.raises(error):
            create_app(FakeLLM(), ServerConfig(api_key_file=str(path)))


def test_health_needs_no_key() -> None:
    with serving(config=ServerConfig(api_key=("k",))) as server:
        for path in ("/health", "/ready", "/ping"):
            for method in ("GET", "HEAD"):
                assert server.request(method, path).status == 200
        for path in ("/load", "/openapi.json", "/v1/models", "/v1/requests/a/trace"):
            check(server.get(path), 401, None, "invalid_api_key")


def test_served_names() -> None:
    config = ServerConfig(served_model_name=("org/a", "b"))
    with serving(FakeLLM, config) as server:
        assert [m["id"] for m in server.get("/v1/models").json["data"]] == ["org/a", "b"]
        assert server.get("/v1/models/org/a").json["id"] == "org/a"
        assert server.post("/v1/completions", {"prompt": "a"}).json["model"] == "org/a"
        named = {"prompt": "a", "model": "b"}
        assert server.post("/v1/completions", named).json["model"] == "b"
        check(
            server.post("/generate", {"prompt": "a", "model": "fake"}),
            404,
            "model",
            "model_not_found",
        )


def test_head(server: Server) -> None:
    """As with GET, but no body."""
    for path in ("/version", "/v1/models", "/v1/models/other", "/nothing", "/generate"):
        get, head = server.get(path), server.request("HEAD", path)
        assert head.status == get.status
        assert head.body == b""
        assert head.headers["Content-Type"] == "application/json"


def test_options(server: Server) -> None:
    """What a route takes; nothing about one that is not there."""
    for path, allowed in (("/generate", {"POST"}), ("/version", {"GET", "HEAD"})):
        answer = server.request("OPTIONS", path)
        assert (answer.status, answer.body) == (204, b"")
        assert set(answer.headers["Allow"].split(",")) == {*allowed, "OPTIONS"}
        check(server.request("DELETE", path), 405)
    check(server.request("OPTIONS", "/nothing"), 404)


def test_quotes_in_errors_are_bounded(server: Server) -> None:
    answer = server.post("/generate", {"prompt": "a", "model": "m" * 100_000})
    check(answer, 404, "model", "model_not_found")
    assert len(answer.body) < 5000
    check(server.get("/" + "a" * 8000), 404)
    raw = b'{"prompt": "a", "stop": ["\\ud83d"]}'
    assert server.post("/generate", raw).status == 400


def test_headers_do_not_tell_the_server_software(server: Server) -> None:
    for answer in (server.get("/version"), server.get("/nothing")):
        assert answer.headers["Server"] == "asyncllm"


ASKED: Any = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    ],
)
def test_official_client_and_bad_requests(
    client: openai.OpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    code: str | None,
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**ASKED | fields | {"stream": stream})
        error = caught.value
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        assert error.message
        assert error.request_id


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (StepError("the step failed"), openai.InternalServerError),
        (NotReady("not now"), openai.InternalServerError),
        (QueueFull("not now", retry_after=0.1), openai.RateLimitError),
        (DeadlineExceeded("too late"), openai.APIStatusError),
    ],
)
def test_official_client_and_failures(
    server: Server,
    client: openai.OpenAI,
    planted: Exception,
    kind: type[openai.APIStatusError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure before the first byte is a status; afterwards the stream raises it."""
    monkeypatch.setattr(server.llm, "fail", planted)
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**ASKED)
    assert str(planted) in caught.value.message
    with (
        pytest.raises(openai.APIError, match=str(planted)),
        client.chat.completions.create(**ASKED, stream=True) as stream,
    ):
        list(stream)


@pytest.mark.parametrize(
    ("planted", "tries"),
    [
        (QueueFull("not now", retry_after=0.01), 3),
        (NotReady("not now"), 3),
        (StepError("the step failed"), 3),
        (DeadlineExceeded("too late"), 1),
    ],
)
def test_official_client_retries_where_that_helps(
    server: Server,
    client: openai.OpenAI,
    planted: Exception,
    tries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.llm, "fail", planted)
    monkeypatch.setattr("asyncllm.server.http.errors.RETRY_SECONDS", 0.01)
    before = len(server.llm.params)
    with pytest.raises(openai.APIStatusError):
        client.with_options(max_retries=2).chat.completions.create(**ASKED)
    assert len(server.llm.params) == before + tries


def test_official_client_with_a_wrong_key() -> None:
    with serving(config=ServerConfig(api_key=("right",))) as server:
        for key, status in (("wrong", 401), ("right", 200)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if status == 200:
                    assert client.models.retrieve("fake").id == "fake"
                    continue
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"
