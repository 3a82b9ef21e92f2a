"""Relay between Ray Serve's proxy and its handle, both fake."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from asyncllm.config.server_config import ServerConfig
from asyncllm.ray import relay
from asyncllm.ray.relay import Relay
from asyncllm.ray.replica import Request
from asyncllm.server.arrivals.routed import LAST_WORDS_HEADER, LOST
from asyncllm.supervise.front.answers import Answer

OK = (200, [(b"content-type", b"text/event-stream"), (b"date", b"now")])
HANGS = "hangs"
WITH_WORDS = (200, [(LAST_WORDS_HEADER.lower().encode(), b64encode(b"last words"))])


class Handle:
    """A handle whose replicas answer one request after the other.

    Args:
        answers: of each request; an exception is raised where it stands.
    """

    def __init__(self, *answers: list[Any], of_all: Any = ()):
        self.requests: list[Request] = []
        self.cancelled = 0
        self.answer = self
        self._answers = iter(answers)
        self._of_all = of_all

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, request: Request) -> Parts:
        self.requests.append(request)
        return Parts(self, next(self._answers))

    def broadcast(self, method: str, request: Request) -> Handle:
        self.requests.append(request)
        return self

    async def results_async(self, **_: Any) -> Any:
        if isinstance(self._of_all, Exception):
            raise self._of_all
        return self._of_all


class Parts:
    def __init__(self, handle: Handle, parts: list[Any]):
        self._handle = handle
        self._parts = iter(parts)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            part = next(self._parts)
        except StopIteration:
            raise StopAsyncIteration from None
        if isinstance(part, BaseException):
            raise part
        if part == HANGS:
            await asyncio.Event().wait()
        return part

    def cancel(self) -> None:
        self._handle.cancelled += 1


class Sent:
    """What the proxy got."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_whole = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.is_whole = not message["more_body"]


async def ask(
    handle: Any,
    path: str = "/v1/completions",
    method: str = "POST",
    body: tuple[bytes, ...] = (b"{", b"}"),
    **options: Any,
) -> Sent:
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(body) - 1}
        for i, part in enumerate(body)
    ]
    headers = [(b"x-request-id", b"mine"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    sent = Sent()
    await Relay(handle, ServerConfig(**options))(scope, receive, sent)
    return sent


async def test_an_answer_is_passed_on() -> None:
    handle = Handle([OK, b"one", b"two"])
    sent = await ask(handle)
    assert (sent.status, sent.body, sent.is_whole) == (200, b"onetwo", True)
    assert sent.headers == {b"content-type": b"text/event-stream"}
    [request] = handle.requests
    assert (request.target, request.body) == (b"/v1/completions", b"{}")
    assert request.headers == [(b"x-request-id", b"mine"), (b"content-length", b"2")]


async def test_another_replica_answers_when_one_dies_before() -> None:
    handle = Handle([ActorDiedError()], [OK, b"whole"])
    assert (await ask(handle)).body == b"whole"
    assert len(handle.requests) == 2


async def test_or_when_its_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ENDING_SECONDS", 0.0)
    assert (await ask(Handle([LOST], [OK, b"whole"]))).body == b"whole"


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/completions", b'"code"'), ("/v1/messages", b'"request_id":"mine"')]
)
async def test_a_request_that_kills_replicas_ends(path: str, key: bytes) -> None:
    sent = await ask(Handle([ActorDiedError()], [ActorDiedError()]), path)
    assert sent.status == 503
    assert key in sent.body
    assert b"retry-after" in sent.headers


async def test_a_stream_ends_with_its_last_words() -> None:
    handle = Handle([WITH_WORDS, b"some, ", ActorDiedError()])
    sent = await ask(handle)
    assert (sent.body, sent.is_whole) == (b"some, last words", True)
    assert sent.headers == {}
    assert handle.cancelled == 1


async def test_half_an_answer_is_not_completed() -> None:
    with pytest.raises(ActorDiedError):
        await ask(Handle([OK, b"some", ActorDiedError()]))


async def test_a_client_that_leaves_while_it_sends_costs_nothing() -> None:
    handle = Handle()
    await ask(handle, body=())
    assert handle.requests == []


async def test_a_body_is_read_until_it_is_too_long() -> None:
    handle = Handle([(413, [])])
    sent = await ask(handle, body=(b"1234", b"5678", b"9"), max_body_bytes=6)
    assert (sent.status, handle.requests[0].body) == (413, b"12345678")


async def test_all_are_asked_what_concerns_all() -> None:
    answers = [
        ("abc", Answer(200, ((b"vary", b"Origin"),), b'{"server_load": 1}')),
        ("xyz", Answer(200, ((b"vary", b"Origin"),), b'{"server_load": 2}')),
    ]
    handle = Handle(of_all=answers)
    sent = await ask(handle, "/load", "GET", (b"",))
    assert sent.body.startswith(b'{"server_load":3,')
    assert sent.headers[b"vary"] == b"Origin"
    assert [request.method for request in handle.requests] == [b"GET"]


@pytest.mark.parametrize(
    ("came", "home"), [((1.0, None), 0), ((1.0, 2.0), 1), ((3.0, 2.0), 0), ((None, None), None)]
)
async def test_a_name_is_the_latest_requests_of_all(came: Any, home: int | None) -> None:
    answers = [
        (name, Answer(200, (), json.dumps({"replica": i, "came": at}).encode()))
        for i, (name, at) in enumerate(zip(("abc", "xyz"), came, strict=True))
    ]
    handle = Handle([OK, b"done"], of_all=answers)
    sent = await ask(handle, "/v1/requests/a/b c%/abort")
    assert (sent.status, sent.body) == (200, b"done")
    asked, sent_on = handle.requests
    assert (b"x-asyncllm-seek", b"a/b%20c%25") in asked.headers
    assert (sent_on.home, sent_on.method, sent_on.path) == (home, b"POST", asked.path)
    assert b"x-asyncllm-seek" not in dict(sent_on.headers)


@pytest.mark.parametrize(
    ("input", "sought"),
    [
        ([{"type": "item_reference", "id": "mine"}, {"id": "other"}], "mine"),
        ([{"role": "user", "content": "x", "id": "b"}, {"id": "a/\u00e9"}], "a/%C3%A9"),
        ([{"role": "user", "content": "x"}, {"type": "item_reference", "id": 3}], None),
        ([{"type": "item_reference", "id": f"msg_{'0' * 30}010000"}], None),
        ("a text", None),
        ([[]], None),
    ],
)
async def test_an_item_of_a_response_is_where_the_request_goes(
    input: Any, sought: str | None
) -> None:
    answers = [(f"{i}", Answer(200, (), b'{"replica":%d,"came":%d}' % (i, i))) for i in (0, 1)]
    handle = Handle([OK, b"done"], of_all=answers)
    body = json.dumps({"input": input}).encode()
    assert (await ask(handle, "/v1/responses", body=(body,))).body == b"done"
    *asked, sent_on = handle.requests
    seeks = [dict(request.headers)[b"x-asyncllm-seek"].decode() for request in asked]
    assert (seeks, sent_on.home) == (([], None) if sought is None else ([sought], 1))
    assert sent_on.body == body


@pytest.mark.parametrize("of_all", [[("abc", Answer(401, (), b"no"))], TimeoutError()])
async def test_a_name_that_cannot_be_sought_is_an_error(of_all: Any) -> None:
    sent = await ask(Handle(of_all=of_all), "/v1/requests/a/trace", "GET", (b"",))
    assert sent.status == (503 if isinstance(of_all, Exception) else 401)


async def test_one_that_fails_says_nothing() -> None:
    answers = [("abc", Answer(200, (), b'{"status": "idle"}')), ActorDiedError()]
    sent = await ask(Handle(of_all=answers), "/health", "HEAD", (b"",))
    assert (sent.status, b'"dead"' in sent.body) == (200, True)


async def test_when_not_all_answer_in_time_one_is_asked() -> None:
    handle = Handle([(200, []), b"one"], of_all=TimeoutError())
    assert (await ask(handle, "/health", "GET", (b"",))).body == b"one"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/live"])
async def test_but_not_waited_for_long(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ASK_SECONDS", 0.01)
    handle = Handle([HANGS], of_all=TimeoutError())
    sent = await ask(handle, path, "GET", (b"",))
    assert (sent.status, handle.cancelled) == (503, 1)
    assert b"a replica does not answer" in sent.body


async def test_without_replicas_nothing_is_healthy() -> None:
    sent = await ask(Handle(of_all=DeploymentUnavailableError(None)), "/health", "GET", (b"",))
    assert (sent.status, b"no replica is ready" in sent.body) == (503, True)
