"""A new configuration while serving: SIGHUP and POST /admin/reload."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.server.serving import ServerProcess, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ADMIN = "the-admin-key"


class Configured:
    """A server with a configuration file, which tests change."""

    def __init__(self, folder: Path, *options: str):
        self.file = folder / "serve.yaml"
        self.keys = folder / "keys"
        self.write()
        self.process = ServerProcess(
            *("--device", "sim", "--sim-profile", "h200-8b", "--config", str(self.file)), *options
        )

    def write(self, *, keys: str = "first\nsecond\n", extra: str = "", name: str = "old") -> None:
        self.keys.write_text(keys)
        self.file.write_text(
            f"served-model-name: {name}\napi-key-file: {self.keys}\nadmin-key: {ADMIN}\n{extra}"
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=30)

    def ask(self, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        with closing(self.connect()) as connection:
            headers = {"Authorization": f"Bearer {key}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def names(self, key: str = "first") -> list[str]:
        status, answer = self.ask("GET", "/v1/models", key)
        assert status == 200, answer
        return [model["id"] for model in answer["data"]]

    def reload(self) -> tuple[int, Any]:
        return self.ask("POST", "/admin/reload", ADMIN)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    made = Configured(tmp_path_factory.mktemp("reload"))
    yield made
    assert made.process.stop() == 0


@pytest.fixture
def server(running: Configured) -> Iterator[Configured]:
    yield running
    running.write()
    assert running.reload()[0] == 200


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


@pytest.mark.parametrize("key", ["", "first", "wrong"])
def test_only_the_admin_key_opens_it(server: Configured, key: str) -> None:
    status, answer = server.ask("POST", "/admin/reload", key)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert server.ask("GET", "/v1/models", ADMIN)[0] == 401, "it is no API key"


def test_without_an_admin_key_there_is_no_such_route() -> None:
    with serving() as fake:
        assert fake.post("/admin/reload", {}).status == 404
        assert "/admin/reload" not in fake.get("/openapi.json").json["paths"]


def test_names_and_keys_are_swapped_and_streams_go_on(server: Configured) -> None:
    with closing(server.connect()) as connection:
        body = {"model": "old", "prompt": "a", "max_tokens": 600, "ignore_eos": True}
        headers = {"Authorization": "Bearer first"}
        connection.request("POST", "/generate", json.dumps({**body, "stream": True}), headers)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: {")
        server.write(keys="second\nthird\n", name="new")
        status, answer = server.reload()
        assert status == 200, answer
        assert answer == {"changed": ["served_model_name", "api_key_file"], "needs_restart": []}
        assert server.ask("POST", "/generate", "first", body)[0] == 401
        assert server.ask("POST", "/generate", "second", body)[0] == 404, "no model of that name"
        assert server.names("third") == ["new"]
        rest = stream.read()
    assert b'"finish_reason":"length"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"extra": "no-such-option: 1\n"}, "unknown key 'no-such-option'"),
        ({"extra": "request-seconds: -1\n"}, "request-seconds must be above 0"),
        ({"extra": "log-level: [\n"}, "serve.yaml"),
        ({"keys": "\n"}, "has no API key in it"),
        ({"keys": "first bananas=3\n"}, "line 1 of "),
        ({"extra": "log-requests: true\nlog-level: error\n"}, "log-requests logs at level info"),
    ],
)
def test_what_is_wrong_changes_nothing(
    server: Configured, fields: dict[str, str], words: str
) -> None:
    server.write(**{"keys": "third\n", "name": "new", **fields})
    status, answer = server.reload()
    assert status == 400
    assert words in answer["error"]["message"]
    assert server.names("first") == ["old"]


def test_other_changes_are_named(server: Configured) -> None:
    server.write(extra="max-num-seqs: 7\nstrict: true\nlog-level: warning\n")
    status, answer = server.reload()
    assert status == 200, answer
    assert answer == {"changed": ["log_level"], "needs_restart": ["max_num_seqs", "strict"]}


def test_a_signal_does_it_too_and_a_restarted_server_remembers(server: Configured) -> None:
    server.write(keys="first\n", name="signalled")
    server.process.process.send_signal(signal.SIGHUP)
    until(lambda: server.names() == ["signalled"])
    server.write(keys="\n", extra="no-such-option: 1\n")
    assert server.reload()[0] == 400
    parent = server.process.process.pid
    serving = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
    os.kill(serving, signal.SIGKILL)
    until(lambda: server.ask("GET", "/ready")[0] == 503)
    until(lambda: server.ask("GET", "/ready")[0] == 200)
    assert server.names() == ["signalled"]
    assert server.ask("GET", "/v1/models", "second")[0] == 401
