"""OpenAI's batch files: requests in, answers out, a line of JSON each.

A request is ``{"custom_id", "method": "POST", "url", "body"}``, its answer ``{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error": null}``. A line that is no request has
no response, and an error ``{"code", "message"}``.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import EngineDead
from asyncllm.server.app import create_app
from asyncllm.server.http.errors import ErrorBody

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM

#: The routes that requests may go to.
URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

#: Time for handlers to notice that their client is gone.
_CLOSE_SECONDS: Final = 2.0
#: Open files reserved for other uses; a request takes two.
_OTHER_FILES: Final = 256


class Item(msgspec.Struct, frozen=True):
    """A request; ``body`` is JSON."""

    custom_id: str
    url: str
    body: bytes


class BadItem(msgspec.Struct, frozen=True):
    """A line that is no valid request, and why."""

    custom_id: str | None
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


class _Named(msgspec.Struct):
    custom_id: str | None = None


def read_items(content: bytes) -> list[Item | BadItem]:
    """The requests of a file in their order, without blank lines."""
    items: list[Item | BadItem] = []
    seen: set[str] = set()
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        item = _read(line, number)
        if isinstance(item, Item):
            if item.custom_id in seen:
                message = f"line {number}: the custom_id {item.custom_id!r} is not unique"
                item = BadItem(item.custom_id, message)
            else:
                seen.add(item.custom_id)
        items.append(item)
    return items


def _read(line: bytes, number: int) -> Item | BadItem:
    try:
        request = msgspec.json.decode(line, type=_Line)
        if request.method != "POST":
            raise ValueError(f"the method must be POST, not {request.method!r}")
        if request.url not in URLS:
            raise ValueError(f"the url must be {' or '.join(URLS)}, not {request.url!r}")
        body = bytes(request.body)
        options = msgspec.json.decode(body, type=_Body)
        if options.stream or options.background:
            raise ValueError("answers of a batch are not streamed, nor made in the background")
    except (ValueError, RecursionError) as error:
        return BadItem(_name_of(line), f"line {number}: {error}")
    return Item(request.custom_id, request.url, body)


def _name_of(line: bytes) -> str | None:
    """The custom_id of an invalid line, if it has one."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (ValueError, RecursionError):
        return None


async def run_batch(
    llm: AsyncLLM,
    config: ServerConfig,
    items: Iterable[Item | BadItem],
    write: Callable[[bytes, bool], None],
) -> None:
    """Answer every item as a server with this configuration would.

    ``write(line, failed)`` is called with each line for the file of answers as it finishes.

    Raises:
        EngineDead: the other items cannot be answered.
    """
    todo = iter(items)

    async def work(session: aiohttp.ClientSession) -> None:
        for item in todo:
            write(*(_bad(item) if isinstance(item, BadItem) else await _answer(session, item)))

    async with _local_server(llm, config) as session:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(_most_at_once(llm)):
                    tasks.create_task(work(session))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _most_at_once(llm: AsyncLLM) -> int:
    """Twice the running requests, so that others wait, within the limit of open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * llm.limits.max_num_seqs
    if files == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, (files - _OTHER_FILES) // 2))


@asynccontextmanager
async def _local_server(
    llm: AsyncLLM, config: ServerConfig
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server in this process, whose socket only this user may use."""
    runner = web.AppRunner(
        create_app(llm, config),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CLOSE_SECONDS,
    )
    await runner.setup()
    try:
        with tempfile.TemporaryDirectory(prefix="asyncllm-") as folder:
            path = str(Path(folder) / "batch.sock")
            await web.UnixSite(runner, path, backlog=4096).start()
            async with aiohttp.ClientSession(
                "http://batch",
                connector=aiohttp.UnixConnector(path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Content-Type": "application/json"},
            ) as session:
                yield session
    finally:
        await runner.cleanup()


async def _answer(session: aiohttp.ClientSession, item: Item) -> tuple[bytes, bool]:
    """Send a request, again while the queue is full. Raises EngineDead."""
    while True:
        async with session.post(item.url, data=item.body) as response:
            body = await response.read()
        if response.status == 503:
            raise EngineDead(msgspec.json.decode(body, type=ErrorBody).error.message)
        if response.status != 429:
            break
        await asyncio.sleep(float(response.headers["retry-after-ms"]) / 1000)
    answer = {
        "status_code": response.status,
        "request_id": response.headers["X-Request-Id"],
        "body": msgspec.Raw(body),
    }
    return _line(item.custom_id, answer, None), response.status != 200


def _bad(item: BadItem) -> tuple[bytes, bool]:
    error = {"code": "invalid_request", "message": item.message}
    return _line(item.custom_id, None, error), True


def _line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    line = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


class _Status(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    custom_id: str | None
    response: _Status | None


def answered_id(line: bytes, number: int) -> str | None:
    """The custom_id of a line of answers; None if the request failed, and is to be tried again.

    Raises:
        ValueError: it is no answer of a batch.
    """
    try:
        found = msgspec.json.decode(line, type=_Answered)
    except msgspec.DecodeError as error:
        raise ValueError(f"line {number} is no answer of a batch: {error}") from error
    return found.custom_id if found.response and found.response.status_code == 200 else None
