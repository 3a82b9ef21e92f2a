"""Web pages of other origins: refused unless configured; preflights without a key."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from tests.support.server.serving import Answer, Server, serving

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


@pytest.mark.parametrize(
    "origin",
    [
        *("", "example.org", "https://example.org/", "https://a b", "**"),
        # No browser writes it so.
        *("https://Example.org", "http://a.org:80", "https://a.org:443", "https://\xe9.org"),
    ],
)
def test_no_origin(origin: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ServerConfig(cors_origin=(origin,))
    assert caught.value.param == "cors_origin"


@pytest.mark.parametrize(
    "origin",
    [
        "http://a.org:443",
        "https://a.org:80",
        "https://[::1]:8443",
        "https://xn--9ca.org",
        "app://a",
    ],
)
def test_an_origin_as_browsers_send_it(origin: str) -> None:
    assert ServerConfig(cors_origin=(origin,)).cors_origin == (origin,)


# -- a server without keys -----------------------------------------------------------------------

OWN = "http://127.0.0.1:1234"  # the Host of the requests below
JSON = {"Content-Type": "application/json"}
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    config = ServerConfig(
        host="bound.example.org",
        cors_origin=(PAGE,),
        allowed_hosts=("llm.example.org", ".inner.example.org", "*.OTHER.example.org", "last."),
    )
    with serving(config=config, is_guarded=True) as running:
        yield running


def raw(server: Server, head: str, body: bytes = b"") -> bytes:
    """The answer to these lines, and a body."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        client.sendall(f"{head}{length}Connection: close\r\n\r\n".encode("latin-1") + body)
        with client.makefile("rb") as answer:
            return answer.read()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "LocalHost",
            "localhost.",
            "localhost:8000",
            "page.localhost:1",
            "LOCALHOST.:1",
        ),
        *(
            "127.0.0.1",
            "127.0.0.1:8000",
            "127.255.3.4",
            "10.1.2.3:80",
            "0.0.0.0",
            "127.1",
            "8.8.8.8",
        ),
        *("2130706433", "0x7f.0.0.1", "127.0.0.1."),
        *("[::1]", "[::1]:8000", "[FE80::1%25eth0]:8000", "[::ffff:127.0.0.1]"),
        *("asyncllm", "my_service:8000", "box.local", "host.docker.internal:8000"),
        *("llm.asyncllm.svc.cluster.local", socket.gethostname()),
        *("llm.example.org", "LLM.Example.ORG.:443", "bound.example.org"),
        *("inner.example.org", "a.b.inner.example.org", "a.other.example.org", "last"),
        "",
    ],
)
def test_names_of_this_server(open_server: Server, host: str) -> None:
    head = f"GET /version HTTP/1.1\r\nHost: {host}\r\n"
    assert status_of(raw(open_server, head)) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example.com", "EVIL.example.com:8000", "evil.example.com.", "example.org"),
        *(
            "llm.example.org.evil.com",
            "evilinner.example.org",
            "localhost.evil.com",
            "xllm.example.org",
        ),
        *("127.0.0.1.evil.com", "127.0.0.1.nip.io", "evil.com:127.0.0.1", "127.0.0.1@evil.com"),
        *("evil.com#.localhost", "evil.com/.localhost", "a b", "[::1].evil.com", "[evil.com]"),
        *("localhost, evil.com", "evil.com\\.localhost", "\xe9vil.local", ".", "..", "localhost:x"),
    ],
)
@pytest.mark.parametrize(
    "request_line", ["GET /version", "HEAD /health", "OPTIONS /v1/models", "GET /"]
)
def test_names_that_a_stranger_may_own(open_server: Server, host: str, request_line: str) -> None:
    answer = raw(open_server, f"{request_line} HTTP/1.1\r\nHost: {host}\r\n")
    assert status_of(answer) in (400, 403), "the parser refuses some before"
    if b"host_not_allowed" in answer and host.startswith("evil.example.com"):
        assert b"--allowed-hosts evil.example.com" in answer


def test_hosts_beside_the_rule(open_server: Server) -> None:
    assert status_of(raw(open_server, "GET /version HTTP/1.0\r\n")) == 200
    several = "Host: localhost\r\nHost: evil.example.com\r\n"
    assert status_of(raw(open_server, f"GET /version HTTP/1.1\r\n{several}")) in (400, 403)
    absolute = "GET http://localhost/version HTTP/1.1\r\nHost: evil.example.com\r\n"
    assert status_of(raw(open_server, absolute)) == 403
    unknown = raw(open_server, "GET /nothing HTTP/1.1\r\nHost: evil.example.com\r\n")
    assert status_of(unknown) == 403


def post(server: Server, path: str, headers: dict[str, str], body: bytes | None = None) -> Answer:
    return server.request(
        "POST",
        path,
        json.dumps(BODY).encode() if body is None else body,
        {"Host": OWN[7:], **headers},
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},  # programs
        {"Content-Type": "text/plain"},
        JSON,
        {"Origin": OWN, **JSON},  # the page, with and without what secure contexts add
        {"Origin": OWN, "Sec-Fetch-Site": "same-origin", **JSON},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin", **JSON},
        {"Sec-Fetch-Site": "none", **JSON},
        {"Origin": PAGE, "Sec-Fetch-Site": "cross-site", **JSON},
        {"Origin": PAGE, **JSON, "Content-Type": "Application/JSON; charset=utf-8"},
        {"Origin": PAGE, "Content-Type": "application/problem+json"},
        # behind a gateway that keeps the Host and speaks HTTPS, or one that does not keep it
        {"Host": "llm.example.org", "Origin": "https://llm.example.org", **JSON},
        {"Host": "llm.example.org:443", "Origin": "https://llm.example.org", **JSON},
        {"Host": "llm.example.org", "Origin": "http://LLM.example.org:80", **JSON},
        {"Origin": "https://llm.example.org", "Sec-Fetch-Site": "same-origin", **JSON},
    ],
)
def test_who_may_use_an_open_server(open_server: Server, headers: dict[str, str]) -> None:
    assert post(open_server, "/generate", headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example.com"},
        {"Origin": "https://evil.example.com", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
        {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "file://"},
        {"Origin": ""},
        {"Origin": f"{PAGE}.evil.com"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "http://localhost:1234"},
        {"Origin": "http://127.0.0.1:1234.evil.com"},
        {"Origin": f"{OWN}/"},
        {"Origin": OWN, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "Cross-Site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data"])
def test_pages_that_may_not_use_an_open_server(
    open_server: Server, headers: dict[str, str], kind: str
) -> None:
    headers = {**headers, "Content-Type": kind}
    for path in ("/generate", "/live/3/abort", "/v1/requests/a/abort", "/nothing"):
        answer = post(open_server, path, headers)
        assert answer.status == 403
        assert answer.json["error"]["code"] == "origin_not_allowed"
        assert "--cors-origin" in answer.json["error"]["message"]
    assert open_server.request("DELETE", "/v1/responses/a", headers=headers).status == 403
    assert open_server.llm.stats.running == 0
    reading = open_server.get("/v1/models", headers)
    assert reading.status == 200, "which such a page cannot read"
    assert "Access-Control-Allow-Origin" not in reading.headers


def test_an_error_names_the_origin_to_allow(open_server: Server) -> None:
    answer = post(open_server, "/api/generate", {"Origin": "https://other.example.org"})
    assert answer.json["error"].endswith("--cors-origin https://other.example.org")
    answer = post(open_server, "/v1/messages", {"Origin": "null"})
    assert answer.json["error"]["message"].endswith("--cors-origin '*'")


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""],
)
def test_a_pages_body_says_that_it_is_json(open_server: Server, kind: str) -> None:
    for origin in (OWN, PAGE):
        answer = post(open_server, "/generate", {"Origin": origin, "Content-Type": kind})
        assert answer.status == 415
        assert answer.json["error"]["code"] == "content_type_not_json"
    # There is nothing to be read.
    answer = post(open_server, "/live/3/abort", {"Origin": OWN, "Content-Type": kind}, b"")
    assert answer.status in (200, 404)


def test_preflights_of_an_open_server(open_server: Server) -> None:
    answer = open_server.request("OPTIONS", "/generate", headers={"Origin": PAGE, **PREFLIGHT})
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    answer = open_server.request("OPTIONS", "/generate", headers={"Origin": OWN, **PREFLIGHT})
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_any_host_and_any_origin() -> None:
    config = ServerConfig(cors_origin=("*",), allowed_hosts=("*",))
    with serving(config=config, is_guarded=True) as server:
        headers = {"Host": "evil.example.com", "Origin": "null", "Sec-Fetch-Site": "cross-site"}
        assert post(server, "/generate", {**headers, **JSON}).status == 200
        assert post(server, "/generate", {**headers, "Content-Type": "text/plain"}).status == 415


def test_a_host_application_judges_by_itself(server: Server) -> None:
    headers = {"Host": "app.example.com", "Origin": "https://else.example.com"}
    assert post(server, "/generate", headers).status == 200


@pytest.mark.parametrize(
    "name", ["", "http://a.b", "a b", "a:80", "a.*.b", "**", "[::1]", "a,b", "*.", "\xe9.org"]
)
def test_no_host(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ServerConfig(allowed_hosts=(name,))
    assert caught.value.param == "allowed_hosts"
