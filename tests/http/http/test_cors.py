"""Web pages of other origins: refused by browsers unless configured, preflights without a key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncllm.errors import BadRequest
from asyncllm.server_config import ServerConfig
from tests.support.server.serving import Server, serving

PAGE = "https://app.example.org"
KEY = {"Authorization": "Bearer k"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[Server]:
    config = ServerConfig(cors_origin=("http://localhost:3000", PAGE), api_key=("k",))
    with serving(config=config) as running:
        yield running


def test_off_by_default(server: Server) -> None:
    answer = server.post("/generate", {"prompt": "a"}, {"Origin": PAGE})
    assert answer.status == 200
    refused = server.request("OPTIONS", "/generate", headers={"Origin": PAGE, **PREFLIGHT})
    for each in (answer, refused):
        assert not [name for name in each.headers if name.lower().startswith("access-control")]


def test_preflight(open_to_page: Server) -> None:
    answer = open_to_page.request("OPTIONS", "/generate", headers={"Origin": PAGE, **PREFLIGHT})
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "Access-Control-Allow-Credentials" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_answers(open_to_page: Server, stream: bool) -> None:
    body = {"prompt": "a", "stream": stream}
    answer = open_to_page.post("/generate", body, {"Origin": PAGE, **KEY})
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
    assert answer.headers["Vary"] == "Origin"


def test_errors_can_be_read(open_to_page: Server) -> None:
    for path, headers, status in (("/generate", {}, 401), ("/nothing", KEY, 404)):
        answer = open_to_page.post(path, {}, {"Origin": PAGE, **headers})
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE


def test_other_origins(open_to_page: Server) -> None:
    for origin in ("https://evil.org", "https://app.example.org.evil.org", "null", f"{PAGE}:8080"):
        for answer in (
            open_to_page.get("/version", {"Origin": origin, **KEY}),
            open_to_page.request("OPTIONS", "/generate", headers={"Origin": origin, **PREFLIGHT}),
        ):
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert answer.headers["Vary"] == "Origin"


def test_only_a_preflight_needs_no_key(open_to_page: Server) -> None:
    assert open_to_page.request("OPTIONS", "/generate", headers={"Origin": PAGE}).status == 401
    assert open_to_page.get("/version", {"Origin": PAGE, **PREFLIGHT}).status == 401


def test_any_origin() -> None:
    with serving(config=ServerConfig(cors_origin=("*",))) as server:
        answer = server.get("/version", {"Origin": "null"})
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in answer.headers


@pytest.mark.parametrize("origin", ["", "example.org", "https://example.org/", "https://a b", "**"])
def test_no_origin(origin: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ServerConfig(cors_origin=(origin,))
    assert caught.value.param == "cors_origin"
