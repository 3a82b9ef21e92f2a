"""The HTTP API as an ASGI application: served by itself, and mounted in a FastAPI application."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import ModelError
from asyncllm.server.embedded.asgi import AsgiApp
from asyncllm.server.embedded.exchange import InProcess
from asyncllm.server.http.slow_clients import MERGE_BYTES
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.polling import until, until_idle

if TYPE_CHECKING:
    from asyncllm.server.embedded.asgi import Message

BODY = {"prompt": "abc"}
ENDLESS = {"prompt": "ab", "stream": True, "max_tokens": 3000, "ignore_eos": True}


def asgi(llm: FakeLLM, **options: Any) -> AsgiApp:
    return AsgiApp(llm, InProcess(llm, ServerConfig(**options)))


class Client:
    """What an ASGI server does for one request."""

    def __init__(self, path: str = "/v1/completions", method: str = "POST", **scope: Any):
        self.scope: Message = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"host", b"x")],
            "client": ["1.2.3.4", 5],
            **scope,
        }
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    def give(self, body: bytes, *, more: bool = False) -> None:
        self.received.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self.received.put_nowait({"type": "http.disconnect"})

    async def run(self, app: AsgiApp) -> None:
        async def send(message: Message) -> None:
            await self.may_send.wait()
            self.sent.append(message)

        await app(self.scope, self.received.get, send)

    @property
    def status(self) -> int:
        assert self.sent[0]["type"] == "http.response.start"
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        assert not self.sent[-1]["more_body"]
        return b"".join(message["body"] for message in self.sent[1:])


async def ask(app: AsgiApp, *parts: bytes, **scope: Any) -> Client:
    client = Client(**scope)
    for part in parts:
        client.give(part, more=True)
    client.give(b"")
    await client.run(app)
    return client


@pytest.mark.parametrize(
    ("scope", "model"),
    [
        ({"path": "/v1/models/fake"}, "fake"),
        ({"path": "/llm/v1/models/fake", "root_path": "/llm"}, "fake"),
        ({"path": "/v1/models/fake", "root_path": "/llm"}, "fake"),  # as servers once did
        ({"path": "/a b/v1/models/fake", "raw_path": b"/a%20b/v1/models/fake",
          "root_path": "/a b"}, "fake"),
        ({"path": "/llm/v1/models/a/b", "raw_path": b"/llm/v1/models/a%2Fb",
          "root_path": "/llm"}, "a/b"),
        ({"path": "/llm/v1/models/a/b", "raw_path": b"/%6Clm/v1/models/a%2Fb",
          "root_path": "/llm"}, "a/b"),
        ({"path": "/v1/models/fäke", "query_string": b"x=y"}, "fäke"),
    ],
)  # fmt: skip
async def test_paths(llm: FakeLLM, scope: dict[str, Any], model: str) -> None:
    app = asgi(llm, served_model_name=("fake", "a/b", "fäke"))
    client = await ask(app, **scope, method="GET")
    assert client.status == 200, client.body
    assert json.loads(client.body)["id"] == model


async def test_an_unknown_route_of_a_mounted_application(llm: FakeLLM) -> None:
    client = await ask(asgi(llm), path="/llm/nothing", root_path="/llm", method="GET")
    assert client.status == 404
    assert b"unknown route: GET /nothing" in client.body


async def test_headers_of_the_connection_are_the_servers(llm: FakeLLM) -> None:
    client = await ask(asgi(llm), json.dumps({**BODY, "stream": True}).encode())
    assert client.status == 200
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "x-request-id" in client.headers
    assert not {"date", "server", "transfer-encoding", "connection"} & client.headers.keys()
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_keys_and_body_limits_hold(llm: FakeLLM) -> None:
    app = asgi(llm, api_key=("secret",), max_body_bytes=1000)
    assert (await ask(app, b"{}")).status == 401
    keyed = [(b"authorization", b"Bearer secret")]
    parts = [b"x" * 500] * 3
    assert (await ask(app, *parts, headers=keyed)).status == 413
    announced = [*keyed, (b"content-length", b"2000000")]
    refused = Client(headers=announced)
    refused.give(b"x", more=True)  # the rest is not waited for
    await refused.run(app)
    assert refused.status == 413
    body = json.dumps(BODY).encode()
    length = (b"content-length", b"%d" % len(body))
    for headers in (keyed, [*keyed, length], [*keyed, (b"transfer-encoding", b"chunked")]):
        assert (await ask(app, body[:5], body[5:], headers=headers)).status == 200


async def test_a_request_that_is_not_http(llm: FakeLLM) -> None:
    bad = [(b"host", b"x"), (b"x-bad", b"a\r\nb: c")]
    assert (await ask(asgi(llm), b"{}", headers=bad)).status == 400


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_disconnects_cancels_its_request(llm: FakeLLM, streamed: bool) -> None:
    client = Client()
    client.give(json.dumps({**BODY, "stream": streamed}).encode())
    llm.hold()
    running = asyncio.create_task(client.run(asgi(llm)))
    await until(lambda: llm.stats.waiting)
    client.leave()
    await running  # no error is raised
    await until_idle(llm)
    llm.resume()
    assert len(llm.aborted) == 1


async def test_a_server_that_does_not_send_gets_merged_events(llm: FakeLLM) -> None:
    client = Client()
    client.give(json.dumps(ENDLESS).encode())
    client.may_send.clear()
    running = asyncio.create_task(client.run(asgi(llm)))
    await until(lambda: llm.stats.generation_tokens == 3000)
    client.may_send.set()
    await running
    events = [json.loads(line[6:]) for line in client.body.split(b"\n\n")[:-2]]
    assert len(events) < 1000
    assert "".join(event["choices"][0]["text"] for event in events) == "ab" * 1500


async def test_half_an_answer_is_an_error_for_the_server(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm.server.streaming.sse.GIVE_UP_BYTES", MERGE_BYTES + 1)
    client = Client()
    client.give(json.dumps(ENDLESS).encode())
    client.may_send.clear()
    running = asyncio.create_task(client.run(asgi(llm)))
    await until(lambda: llm.stats.generation_tokens and not llm.stats.running)
    client.may_send.set()
    with pytest.raises(ConnectionError):
        await running


async def test_lifespan() -> None:
    llm = FakeLLM()
    client = Client(type="lifespan")
    running = asyncio.create_task(client.run(asgi(llm)))
    client.received.put_nowait({"type": "lifespan.startup"})
    await until(lambda: client.sent)
    assert client.sent.pop() == {"type": "lifespan.startup.complete"}
    assert llm.ready
    client.received.put_nowait({"type": "lifespan.shutdown"})
    await running
    assert client.sent == [{"type": "lifespan.shutdown.complete"}]
    assert not llm.healthy


async def test_a_model_that_cannot_be_loaded_ends_the_lifespan() -> None:
    client = Client(type="lifespan")
    client.received.put_nowait({"type": "lifespan.startup"})
    await client.run(asgi(FakeLLM(load_error=ModelError("planted"))))
    assert client.sent == [{"type": "lifespan.startup.failed", "message": "planted"}]


async def test_there_are_no_websockets(llm: FakeLLM) -> None:
    client = Client(type="websocket")
    client.received.put_nowait({"type": "websocket.connect"})
    await client.run(asgi(llm))
    assert client.sent == [{"type": "websocket.close"}]


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """By uvicorn on a real socket."""
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server._serve([listening]))  # without signal handlers
    await until(lambda: server.started or running.done())
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        await running
        listening.close()


async def test_mounted_in_fastapi(llm: FakeLLM) -> None:
    app = FastAPI()
    app.mount("/llm", asgi(llm))

    @app.get("/")
    async def home() -> str:
        return "home"

    async with served(app) as client:
        assert (await client.get("/")).json() == "home"
        answer = await client.post("/llm/v1/completions", json=BODY)
        assert answer.json()["choices"][0]["text"] == "abc"
        assert (await client.get("/llm/v1/models/fake")).json()["id"] == "fake"
        # An event arrives while the answer goes on; leaving cancels it.
        async with client.stream("POST", "/llm/v1/completions", json=ENDLESS) as stream:
            assert (await anext(stream.aiter_lines())).startswith("data: ")
            llm.hold()
        await until_idle(llm)
        llm.resume()
    assert len(llm.aborted) == 1
    assert llm.healthy  # the host started it, and closes it


async def test_served_by_itself() -> None:
    llm = FakeLLM()
    async with served(asgi(llm)) as client:
        assert llm.ready
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert not llm.healthy
