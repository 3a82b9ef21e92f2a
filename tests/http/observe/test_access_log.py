"""``--log-requests``: one line for each request, and none of its text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from tests.support.server.serving import Server, serving

KEY = {"Authorization": "Bearer sesame", "X-Request-Id": "mine"}
CHAT = {"messages": [{"role": "user", "content": "whisper"}], "max_tokens": 5}


class Lines:
    """The lines that were logged so far, and the words of each."""

    def __init__(self, caplog: pytest.LogCaptureFixture, server: Server):
        self._caplog = caplog
        self._server = server

    def all(self) -> list[str]:
        name = "asyncllm.server.observe.access_log"
        return [record.getMessage() for record in self._caplog.records if record.name == name]

    def one(self) -> str:
        """The line of the only request so far, which may be written after its answer."""
        self._server.until(lambda: bool(self.all()))
        [line] = self.all()
        self._caplog.clear()
        return line


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    config = ServerConfig(log_requests=True, api_key=("open", "sesame"), served_model_name=("m",))
    with serving(config=config) as running:
        yield running


@pytest.fixture
def lines(server: Server, caplog: pytest.LogCaptureFixture) -> Lines:
    server.until_idle()
    server.llm.cached = 0
    caplog.set_level("INFO", "asyncllm")
    return Lines(caplog, server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_answered(server: Server, lines: Lines, stream: bool) -> None:
    server.llm.cached = 3
    assert server.post("/v1/chat/completions", {**CHAT, "stream": stream}, KEY).status == 200
    line = lines.one()
    assert re.fullmatch(
        r"request mine POST /v1/chat/completions 200 model=m tenant=key-2 prompt=\d+ cached=3 "
        r"output=5 finish=length ttft=\d+\.\dms total=\d+\.\dms",
        line,
    )
    assert "whisper" not in line
    assert "sesame" not in line


def test_the_tokens_of_all_choices_are_added_up(server: Server, lines: Lines) -> None:
    body = {"prompt": ["ab", "cdef"], "max_tokens": 3, "n": 2}
    assert server.post("/v1/completions", body, KEY).status == 200
    # One token for the start and one a byte, for each of two choices; "ab" ends by itself.
    line = lines.one()
    assert " prompt=16 " in line
    assert " output=12 finish=stop,length " in line


@pytest.mark.parametrize(
    ("path", "body", "headers", "words"),
    [
        (
            "/v1/completions",
            {"prompt": "x"},
            {},
            "401 model=- tenant=- error=invalid_request_error",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "model": "other\nline"},
            KEY,
            "404 model=- tenant=key-2 error=invalid_request_error code=model_not_found param=model",
        ),
        ("/v1/completions", {"prompt": "x", "n": 0}, KEY, "code=- param=n"),
        ("/v1/completions", b"{", KEY, "/v1/completions 400 "),
        ("/nowhere/x%0ay", {}, KEY, "POST /nowhere/x%0ay 404 "),
    ],
)
def test_refusals(
    server: Server, lines: Lines, path: str, body: object, headers: dict[str, str], words: str
) -> None:
    assert server.post(path, body, headers).status >= 400
    line = lines.one()
    assert words in line
    assert "\n" not in line


def test_a_full_queue(server: Server, lines: Lines) -> None:
    server.llm.hold()
    try:
        body = {"prompt": "x", "n": 16, "best_of": 16}
        client = server.open("/v1/completions", body, extra="Authorization: Bearer open\r\n")
        server.until(lambda: server.llm.stats.waiting + server.llm.stats.running == 16)
        assert server.post("/v1/completions", {"prompt": "x", "n": 16}, KEY).status == 429
        assert "429 model=- tenant=key-2 error=rate_limit_error code=queue_full" in lines.one()
        client.close()
        server.until(lambda: bool(lines.all()))
        assert " 499 model=m tenant=key-1 " in lines.one()
    finally:
        server.llm.resume()


def test_probes_and_scrapes_have_no_line(server: Server, lines: Lines) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/version"):
        assert server.get(path, KEY).status == 200
    assert server.get("/v1/models/other", KEY).status == 404
    assert "GET /v1/models/{id} 404 " in lines.one()


def test_a_response_in_the_background_is_logged_when_it_ends(server: Server, lines: Lines) -> None:
    server.llm.hold()
    try:
        body = {"input": "hello", "background": True, "max_output_tokens": 16}
        assert server.post("/v1/responses", body, KEY).json["status"] in ("queued", "in_progress")
        assert lines.all() == []
    finally:
        server.llm.resume()
    assert re.search(r"POST /v1/responses 200 model=m tenant=key-2 .* output=\d+ ", lines.one())


def test_no_line_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asyncllm")
    with serving() as server:
        assert server.post("/v1/chat/completions", CHAT).status == 200
        assert server.post("/v1/chat/completions", {}).status == 400
    assert not [record for record in caplog.records if "access_log" in record.name]


def test_a_level_that_would_hide_the_lines() -> None:
    with pytest.raises(BadRequest, match="log_level warning leaves out"):
        ServerConfig(log_requests=True, log_level="warning")
