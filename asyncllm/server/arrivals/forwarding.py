"""What a replica does with requests that are not about itself alone.

The front may give any request to any replica. The replica has parsed it, so it knows best what it
is about: for what concerns all, it has the front ask all; what another replica has, it sends there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncllm.errors import NotReady
from asyncllm.server.arrivals.names import NUMBERS
from asyncllm.server.arrivals.routed import Routed, RoutedConnection, routed_of
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.middleware import request_id
from asyncllm.server.http.route import BY_HANDLER
from asyncllm.server.observe.access_log import current_entry
from asyncllm.supervise.front.answers import Answer, read_answer

#: In a question of the front, with a name: which replica has what is called so, and since when?
SEEK: Final = "X-Asyncllm-Seek"
#: Headers of a request that say whose it is, and where it comes from.
_ASKED_WITH: Final = frozenset(
    ("host", "authorization", "x-api-key", "origin", "sec-fetch-site", "accept", "content-type")
)
#: Headers of an answer of all that each replica writes, and so this one.
_OF_EACH: Final = frozenset((b"server", b"date", b"x-request-id", b"vary"))
#: Headers that say how a request is sent, which changes.
_OF_SENDING: Final = frozenset(
    ("content-length", "transfer-encoding", "content-encoding", "expect", "connection", "trailer")
)


class SentHome(Exception):
    """Another replica answers the request."""


@web.middleware
async def forward(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The innermost middleware of a replica that has a front."""
    routed, route = routed_of(request), request.app[BY_HANDLER].get(request.match_info.handler)
    if routed is None or route is None:
        return await handler(request)
    if routed.is_question:
        return await answer_seek(request, handler)
    if route.asks:
        answer = await _ask(routed, request, route.asks)
        _logged_elsewhere()
        return _whole(answer)
    home, name = None, request.match_info.get("id", "")
    if route.home is not None:
        home = route.home(name)
    elif route.came is not None and name:
        home = await seek(request, name)
    try:
        send_home(request, home)
        return await handler(request)
    except SentHome:
        return web.Response()  # this process has no connection any more


@web.middleware
async def answer_seek(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The innermost middleware of a replica that no client asks itself: answers ``SEEK``."""
    route = request.app[BY_HANDLER].get(request.match_info.handler)
    if route is None or route.came is None or SEEK not in request.headers:
        return await handler(request)
    _logged_elsewhere()
    came = route.came(request, unquote(request.headers[SEEK]))
    return json_response({"replica": request.app[NUMBERS].replica, "came": came})


def send_home(request: web.Request, home: int | None, body: bytes | bytearray = b"") -> None:
    """Give the request to the replica that has what it is about; returns if that is this one.

    Args:
        home: its number, as clients have it; None if it can be any.
        body: of the request, decompressed; all of it, or nothing if it does not matter.

    Raises:
        SentHome: the other replica answers it.
        NotReady: the connection cannot pass to the other replica now.
    """
    numbers, protocol, transport = request.app[NUMBERS], request.protocol, request.transport
    if home is None or home == numbers.replica or home >= numbers.replicas:
        return
    if not isinstance(protocol, RoutedConnection) or protocol.routed is None:
        return
    if transport is None or transport.is_closing():
        raise SentHome
    if transport.get_write_buffer_size() > 0:
        raise NotReady("the answer to a request before this one is not read yet; try again")
    try:
        more = protocol.after(request)
        data = _request_home(request, body, is_last=more is None)
        protocol.routed.goes_home(home, data, more or b"")
    except OSError:
        raise NotReady("too many open files; try again") from None
    transport.abort()  # the front has an end, too: the connection stays open
    _logged_elsewhere()
    raise SentHome


def _logged_elsewhere() -> None:
    """The log of another replica has a line about this request, and this one's has none."""
    if (entry := current_entry()) is not None:
        entry.postponed = True


async def seek(request: web.Request, name: str) -> int | None:
    """The replica that has something, or had it last; None if none has it.

    Raises:
        NotReady: a replica that may have it does not answer.
    """
    routed = routed_of(request)
    if routed is None:
        return None
    found = await _ask(routed, request, "seek", (f"{SEEK}: {quote(name)}",))
    if found.status != 200:
        why = found.json().get("error", {}).get("message")
        raise NotReady(why or "a replica does not answer; try again")
    home: int | None = found.json()["replica"]
    return home


async def _ask(
    routed: Routed, request: web.Request, what: str, lines: Iterable[str] = ()
) -> Answer:
    """What all replicas answer together.

    Raises:
        NotReady: nobody answers.
    """
    method = "GET" if request.method == "HEAD" else request.method
    kept = [f"{n}: {v}" for n, v in request.headers.items() if n.lower() in _ASKED_WITH]
    kept += [f"X-Request-Id: {request_id.get()}", "Connection: close", *lines]
    try:
        ours, theirs = socket.socketpair()
    except OSError:
        raise NotReady("too many open files; try again") from None
    try:
        routed.channel.ask(what, theirs, _request_bytes(request, method, kept))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
    except OSError:
        ours.close()
        raise NotReady("too many open files; try again") from None
    try:
        answer = read_answer(await reader.read())
    finally:
        writer.close()
    if answer is None:
        raise NotReady("no replica answers; try again")
    return answer


def _request_home(request: web.Request, body: bytes | bytearray, *, is_last: bool) -> bytes:
    """``is_last``: nothing that the client sends after it is to be read."""
    left_out = _OF_SENDING if is_last else _OF_SENDING - {"connection"}
    lines = [f"{n}: {v}" for n, v in request.headers.items() if n.lower() not in left_out]
    if is_last:
        lines.append("Connection: close")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return _request_bytes(request, request.method, lines) + body


def _request_bytes(request: web.Request, method: str, lines: Iterable[str]) -> bytes:
    """Its head, with other header lines."""
    version = request.version
    start = f"{method} {request.rel_url.raw_path_qs} HTTP/{version.major}.{version.minor}"
    return "\r\n".join((start, *lines, "", "")).encode("utf-8", "surrogateescape")


def _whole(answer: Answer) -> web.Response:
    headers = [(n.decode().title(), v.decode()) for n, v in answer.headers if n not in _OF_EACH]
    return web.Response(status=answer.status, body=answer.body, headers=headers)
