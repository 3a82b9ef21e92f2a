"""GET /live and the page's files: who sees what, and how much."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.native import live
from asyncllm.server.native.live_answers import MOST_ROWS
from asyncllm.server.page.files import CONTENT_TYPES, FOLDER
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.openapi import CHAT, GENERATE, check
from tests.support.server.serving import Server, serving

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYS = ServerConfig(api_key=("secret-a", "secret-b"))
BODY = {"prompt": "a private question", "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(autouse=True)
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 0.0)


@pytest.fixture
def guarded() -> Iterator[Server]:
    with serving(lambda: FakeLLM(max_running=1), KEYS) as running:
        yield running


@pytest.fixture
def guarded_with_admin() -> Iterator[Server]:
    config = ServerConfig(api_key=KEYS.api_key, admin_key="boss")
    with serving(lambda: FakeLLM(max_running=1), config) as running:
        yield running


def hold(server: Server, *names: str, key: str = "") -> list[Any]:
    """Requests that run or wait until ``resume``."""
    server.call(server.llm.hold)
    sockets = []
    for name in names:
        count = server.llm.stats.waiting + 1
        extra = f"X-Request-Id: {name}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
        sockets.append(server.open(GENERATE, BODY, extra=extra))
        server.until(partial(_wait, server, count))
    return sockets


def _wait(server: Server, count: int) -> bool:
    return server.llm.stats.waiting == count


def let_go(server: Server, sockets: list[Any]) -> None:
    server.call(server.llm.resume)
    for socket in sockets:
        assert socket.recv(4096).startswith(b"HTTP/1.1 200")
        socket.close()


def test_it_tells_why_requests_wait(server: Server, document: dict[str, Any]) -> None:
    sockets = hold(server, "one", "two")
    answer = server.get("/live")
    check(document, "GET", "/live", answer)
    told = answer.json
    assert told["num_waiting"] == 2
    assert [row["name"] for row in told["waiting"]] == ["one", "two"]
    assert {row["reason"] for row in told["waiting"]} == {"slots"}
    assert told["sees_all"]
    assert b"private" not in answer.body
    let_go(server, sockets)
    server.until_idle()
    ended = server.get("/live").json["ended"]
    assert [row["name"] for row in ended][:2] == ["two", "one"]
    assert ended[0]["outcome"] == "length"


def test_a_key_sees_its_own_requests_only(guarded: Server) -> None:
    sockets = hold(guarded, "mine", key="secret-a") + hold(guarded, "theirs", key="secret-b")
    assert guarded.get("/live").status == 401
    assert guarded.get("/live/1/trace").status == 401
    told = guarded.get("/live", bearer("secret-a")).json
    assert not told["sees_all"]
    mine, other = told["waiting"]
    assert (mine["name"], mine["tenant"], mine["id"]) == ("mine", "key-1", 1)
    assert (other["name"], other["tenant"], other["id"]) == ("", "", None)
    assert other["prompt_tokens"] == mine["prompt_tokens"]
    assert other["reason"] == "slots"
    assert guarded.get("/live/1/trace", bearer("secret-a")).json["id"] == "mine"
    assert guarded.get("/live/1/trace", bearer("secret-b")).status == 404
    assert guarded.post("/live/1/abort", b"", bearer("secret-b")).status == 404
    let_go(guarded, sockets)
    guarded.until_idle()
    ended = guarded.get("/live", bearer("secret-b")).json["ended"]
    assert [row["name"] for row in ended] == ["theirs"]


def test_the_admin_key_sees_and_ends_all(guarded_with_admin: Server) -> None:
    server, admin = guarded_with_admin, bearer("boss")
    sockets = hold(server, "mine", key="secret-a") + hold(server, "theirs", key="secret-b")
    told = server.get("/live", admin).json
    assert told["sees_all"]
    assert server.get("/live", bearer("secret-a")).json["admin_sees_more"]
    assert [(row["name"], row["tenant"]) for row in told["waiting"]] == [
        ("mine", "key-1"),
        ("theirs", "key-2"),
    ]
    assert server.get("/live/2/trace", admin).json["id"] == "theirs"
    assert server.post("/live/2/abort", b"", admin).status == 200
    assert server.get("/v1/models", admin).status == 401, "it is no API key"
    for headers in ({}, bearer("bos"), bearer("")):
        assert server.get("/live", headers).status == 401
        assert server.get("/live/1/trace", headers).status == 401
        assert server.post("/live/1/abort", b"", headers).status == 401
    let_go(server, sockets)


def test_rows_are_bounded_and_ones_own_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.server.native.live_answers.MOST_ROWS", 3)
    with serving(FakeLLM, KEYS) as server:
        sockets = hold(server, *"abcde", key="secret-a") + hold(server, "z", key="secret-b")
        told = server.get("/live", bearer("secret-b")).json
        assert [row["name"] for row in told["waiting"]] == ["", "", "", "z"]
        assert told["num_waiting"] == 6
        let_go(server, sockets)
    assert MOST_ROWS < 100


def test_cancelling_and_the_trace_of_a_number(server: Server, document: dict[str, Any]) -> None:
    sockets = hold(server, "held")
    [row] = server.get("/live").json["waiting"]
    path = f"/live/{row['id']}/abort"
    answer = server.post(path, b"")
    check(document, "POST", path, answer)
    assert answer.json == {"id": "held", "aborted": True}
    let_go(server, sockets)
    server.until_idle()
    assert server.post(path, b"").status == 404
    path = f"/live/{row['id']}/trace"
    answer = server.get(path)
    check(document, "GET", path, answer)
    assert answer.json["id"] == "held"
    assert answer.json["sequences"][0]["outcome"] == "abort"


@pytest.mark.parametrize("number", ["0", "999999", "x", "-1", "1" * 30, "%C2%B2"])
def test_a_request_that_is_not_there(server: Server, number: str) -> None:
    assert server.get(f"/live/{number}/trace").status == 404
    assert server.post(f"/live/{number}/abort", b"").status == 404


def test_a_view_is_made_once_for_all_who_ask(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INTERVAL_SECONDS", 60.0)
    view = Mock(side_effect=server.llm.view)
    monkeypatch.setattr(server.llm, "view", view)
    assert len({server.get("/live").body for _ in range(5)}) == 1
    assert view.call_count <= 1


def test_a_dead_or_loading_engine(server: Server) -> None:
    for field in ("ready", "healthy"):
        server.call(partial(setattr, server.llm, field, False))
        assert server.get("/live").status == 503
        assert server.get("/", HTML).status == 200, "the page says what is the matter"
        server.call(partial(setattr, server.llm, field, True))


# -- the page's files ------------------------------------------------------------------------------


def test_browsers_get_the_page_and_others_ollamas_line(server: Server) -> None:
    page = server.get("/", HTML)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Vary"] == "Accept, Accept-Encoding"
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert server.get("/", headers).body == b"Ollama is running"
    assert server.request("HEAD", "/", headers=HTML).body == b""


def test_the_page_needs_no_key_and_what_it_shows_does(guarded: Server) -> None:
    assert guarded.get("/", HTML).status == 200
    assert guarded.get("/page/main.js").status == 200
    assert guarded.get("/live").status == 401


def test_the_files_are_small_and_ask_nobody_else(server: Server) -> None:
    files = sorted(FOLDER.iterdir())
    assert {path.suffix for path in files} == set(CONTENT_TYPES)
    assert sum(path.stat().st_size for path in files) < 150_000
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 52_000
    named = set()
    for path in files:
        text = path.read_text("utf-8")
        outside = re.findall(r"https?://[^\"'\s]+", text)
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|eval\(|style=", text), path.name
        named |= set(re.findall(r"[\"'](?:page|\.)/([\w.]+)[\"']", text))
    assert named | {"index.html", "lezer_license.txt"} == {path.name for path in files}
    for name in named:
        answer = server.get(f"/page/{name}")
        assert answer.status == 200
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        packed = server.get(f"/page/{name}", {"Accept-Encoding": "gzip, br"})
        assert gzip.decompress(packed.body) == answer.body == (FOLDER / name).read_bytes()
    for name in ("__init__.py", "..%2Ffiles.py", "files.py", "none.js"):
        assert server.get(f"/page/{name}").status == 404


def test_without_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config=ServerConfig(page=False)) as server:
        assert server.get("/", HTML).body == b"Ollama is running"
        assert server.get("/live").status == 404
        assert server.get("/page/main.js").status == 404
        assert "/live" not in server.get("/openapi.json").json["paths"]
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "a"}]}).status == 200
