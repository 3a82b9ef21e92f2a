"""Transports for httpx: its clients, and SDKs built on them, reach the server without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Generator,
    Iterator,
)
from contextlib import contextmanager, suppress
from typing import Final, Protocol, TypeVar

import h11

from asyncllm.errors import EngineDead
from asyncllm.server.embedded.exchange import Exchange, Headers, InProcess, ask

try:  # what newer SDKs use; some accept no other
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]


T = TypeVar("T")

#: Relative paths of a client begin here. No name is resolved.
BASE_URL: Final = "http://asyncllm"


def async_client(server: InProcess) -> httpx.AsyncClient:
    """A client for the event loop that the application runs on. It has no timeouts by itself."""
    return httpx.AsyncClient(
        transport=InProcessTransport(server), base_url=BASE_URL, timeout=None, trust_env=False
    )


def client(server: InProcess, thread: LoopRunner) -> httpx.Client:
    """A client for any thread but that of the event loop."""
    return httpx.Client(
        transport=ThreadTransport(server, thread), base_url=BASE_URL, timeout=None, trust_env=False
    )


class LoopRunner(Protocol):
    """As ``asyncllm.llm.loop_thread.LoopThread``: runs the application's event loop."""

    def run(self, coroutine: Coroutine[object, object, T]) -> T: ...
    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]: ...


class InProcessTransport(httpx.AsyncBaseTransport):
    """Sends every request to one application, whatever host its URL names.

    Of httpx's timeouts, "read" holds: the longest wait for a part of an answer.
    """

    def __init__(self, server: InProcess):
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.AsyncByteStream)
        call = Call(request)
        status, headers = await call.send(self._server, request.stream)
        return httpx.Response(status, headers=headers, stream=_AsyncBody(call))

    async def aclose(self) -> None:
        await self._server.aclose()


class ThreadTransport(httpx.BaseTransport):
    """As ``InProcessTransport``, for other threads than that of the application's event loop."""

    def __init__(self, server: InProcess, thread: LoopRunner):
        self._server = server
        self._thread = thread

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        call = Call(request)
        whole = _all(b"".join(request.stream))
        with _errors(request):
            status, headers = self._thread.run(call.send(self._server, whole))
        return httpx.Response(status, headers=headers, stream=_Body(call, self._thread))

    def close(self) -> None:
        with suppress(EngineDead):  # its requests have ended with the engine
            self._thread.run(self._server.aclose())


class Call:
    """One request and its answer."""

    def __init__(self, request: httpx.Request):
        self.request = request
        self._seconds: float | None = request.extensions.get("timeout", {}).get("read")
        self._exchange: Exchange | None = None

    async def send(self, server: InProcess, body: AsyncIterable[bytes]) -> tuple[int, Headers]:
        """Send the request; returns the status and the headers of its answer."""
        exchange = self._exchange = await server.open()
        request = self.request
        head = request.method.encode("ascii"), request.url.raw_path, request.headers.raw
        try:
            with _errors(request):
                async with asyncio.timeout(self._seconds):
                    return await ask(exchange, *head, body)
        except BaseException:
            exchange.disconnect()
            raise

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The answer's body as it arrives."""
        assert self._exchange is not None
        with self._exchange, _errors(self.request):
            body = self._exchange.body()
            while True:
                async with asyncio.timeout(self._seconds):
                    part = await anext(body, None)
                if part is None:
                    return
                yield part

    async def leave(self) -> None:
        """Cancel the request if it still runs."""
        if self._exchange is not None:
            self._exchange.disconnect()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, call: Call):
        self._call = call

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._call.parts()

    async def aclose(self) -> None:
        await self._call.leave()


class _Body(httpx.SyncByteStream):
    def __init__(self, call: Call, thread: LoopRunner):
        self._call = call
        self._thread = thread

    def __iter__(self) -> Iterator[bytes]:
        with _errors(self._call.request):
            yield from self._thread.iterate(self._call.parts())

    def close(self) -> None:
        with suppress(EngineDead):
            self._thread.run(self._call.leave())


async def _all(body: bytes) -> AsyncIterator[bytes]:
    yield body


@contextmanager
def _errors(request: httpx.Request) -> Iterator[None]:
    """Errors as httpx's clients know them."""
    try:
        yield
    except EngineDead as error:
        raise httpx.ConnectError(str(error), request=request) from error
    except TimeoutError as error:
        raise httpx.ReadTimeout("the server took too long", request=request) from error
    except h11.LocalProtocolError as error:
        raise httpx.LocalProtocolError(str(error), request=request) from error
    except ConnectionError as error:
        raise httpx.RemoteProtocolError(str(error), request=request) from error
