"""AsgiApp: the HTTP API for ASGI servers, and for frameworks that mount ASGI applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import h11

from asyncllm.errors import AsyncLLMError
from asyncllm.server.embedded.exchange import Exchange, Headers, InProcess
from asyncllm.server.model import Model

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)

#: Headers of an answer that the ASGI server writes itself.
OF_THE_SERVER: Final = frozenset(
    (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding")
)
#: What a path may have unquoted (RFC 3986).
_PATH_SAFE: Final = "/:@!$&'()*+,;=~-._"


class AsgiApp:
    """An ASGI 3 application, which passes every request to an application of aiohttp's.

    ``app.mount("/llm", AsgiApp(...))`` in FastAPI or Starlette leaves starting the model to the
    host. Served by itself (``uvicorn module:app``), it starts and closes the model.
    """

    def __init__(self, llm: Model, server: InProcess):
        self._llm = llm
        self._server = server

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})  # before it was accepted: 403
        else:
            raise ValueError(f"unknown ASGI scope: {scope['type']}")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._llm.start()
        except Exception as error:
            if not isinstance(error, AsyncLLMError):
                log.exception("the model cannot be started")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._server.aclose()
        await self._llm.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        peer = scope.get("client")
        exchange = await self._server.open(None if peer is None else tuple(peer))
        request = _Request(exchange, receive)
        with exchange:
            try:
                await request.begin(scope)
                await self._pass_on(exchange, send)
            except h11.LocalProtocolError as error:
                await _refuse(send, str(error))
            except ConnectionError:
                if not request.client_is_gone:
                    raise  # the client gets half an answer; only the ASGI server can tell it so
            finally:
                request.stop()

    async def _pass_on(self, exchange: Exchange, send: Send) -> None:
        status, headers = await exchange.head()
        kept = [header for header in headers if header[0].lower() not in OF_THE_SERVER]
        await send({"type": "http.response.start", "status": status, "headers": kept})
        async for part in exchange.body():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Request:
    """Sends a request's body, and disconnects when the client does.

    Attributes:
        client_is_gone: it has disconnected.
    """

    def __init__(self, exchange: Exchange, receive: Receive):
        self.client_is_gone = False
        self._exchange = exchange
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    async def begin(self, scope: Message) -> None:
        """Send the head now, and the body while others wait for the answer.

        Raises:
            h11.LocalProtocolError: what the ASGI server passes on is not HTTP/1.1.
        """
        first = await self._receive()
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        headers = _framed(headers, first)
        self._exchange.send_head(scope["method"].encode("latin-1"), target_of(scope), headers)
        self._task = asyncio.create_task(self._run(first))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, message: Message) -> None:
        try:
            while message["type"] == "http.request":
                if not await self._exchange.send_body(message.get("body", b"")):
                    break
                if not message.get("more_body", False):
                    self._exchange.end_body()
                    break
                message = await self._receive()
            while message["type"] != "http.disconnect":
                message = await self._receive()
        except h11.LocalProtocolError:
            pass  # the body is not as long as its headers say
        self.client_is_gone = True
        self._exchange.disconnect()


def _framed(headers: Headers, first: Message) -> Headers:
    """The headers with one that says how long the body is, which HTTP/2 leaves open."""
    kept = [header for header in headers if header[0].lower() != b"transfer-encoding"]
    if any(name.lower() == b"content-length" for name, _ in kept):
        return kept
    if first.get("more_body", False):
        return [*kept, (b"transfer-encoding", b"chunked")]
    if body := first.get("body", b""):
        return [*kept, (b"content-length", b"%d" % len(body))]
    return kept


def target_of(scope: Message) -> bytes:
    """Path and query as in a request line, without the path that we are mounted at."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or quote(path, safe=_PATH_SAFE).encode()
    raw = raw.partition(b"?")[0]  # some servers leave the query in it
    if root and (path + "/").startswith(root + "/"):  # else the server has removed it
        quoted = quote(root, safe=_PATH_SAFE).encode()
        is_quoted_so = raw.startswith(quoted)
        path = path.removeprefix(root)
        raw = raw.removeprefix(quoted) if is_quoted_so else quote(path, safe=_PATH_SAFE).encode()
    query: bytes = scope.get("query_string", b"")
    return (raw or b"/") + (b"?" + query if query else b"")


async def _refuse(send: Send, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode(), "more_body": False})
