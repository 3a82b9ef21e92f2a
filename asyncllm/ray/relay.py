"""Relay: an ASGI application that passes each request to a replica, and its answer back."""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from asyncllm.errors import AsyncLLMError, EngineDead, NotReady
from asyncllm.ray.replica import Request
from asyncllm.server.app import ROOTS, ROUTES
from asyncllm.server.arrivals.forwarding import SEEK
from asyncllm.server.arrivals.routed import LAST_WORDS_HEADER, LOST
from asyncllm.server.embedded.asgi import OF_THE_SERVER, target_of
from asyncllm.server.http.errors import HttpError, error_response
from asyncllm.server.http.middleware import new_request_id, request_id
from asyncllm.server.reload import ROUTE as RELOAD
from asyncllm.supervise.front.answers import MERGES, Answer, first
from asyncllm.supervise.front.metrics import labelled
from asyncllm.supervise.front.request import PROBES, home_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

    from asyncllm.config.server_config import ServerConfig
    from asyncllm.ray.replica import Replica, Request
    from asyncllm.server.embedded.asgi import Message, Receive, Send
    from asyncllm.server.http.errors import ErrorWriter
    from asyncllm.supervise.front.answers import Answer

log = logging.getLogger(__name__)

#: The process of a replica whose engine has died lives for less than this.
ENDING_SECONDS: Final = 1.5
#: How many replicas may die of a request before its client gets an error: one more than chance.
_ATTEMPTS: Final = 2
_LAST_WORDS: Final = LAST_WORDS_HEADER.lower().encode()
#: Of an answer. Ray Serve adds the request's id itself.
_NOT_PASSED_ON: Final = OF_THE_SERVER | {b"x-request-id", _LAST_WORDS}
#: Of a request: its body is passed on as a whole, and only the front seeks.
_NOT_SENT_ON: Final = (b"content-length", b"transfer-encoding", SEEK.lower().encode())


class Relay:
    """Ray Serve's proxies send requests here.

    A request whose replica dies before it answers goes to another one. A stream that has begun
    ends with an error.
    """

    def __init__(self, replicas: DeploymentHandle[Replica], server: ServerConfig):
        self._replicas = replicas.options(stream=True)
        self._server = server

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close"})  # before it was accepted: 403

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id.set(given or new_request_id())
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            body = await self._read(receive)
            if body is None:
                return
            request = _request(scope, path, body)
            name = name_in(request)
            join = joined(scope["method"], path, name)
            answer = None
            if join is not None:
                answer = await self._ask_all(request, name, join)
            if answer is not None and answer.status == 200 and name:
                home = answer.json()["replica"]
                request, answer = msgspec.structs.replace(request, home=home), None
            if answer is None:
                # One replica answers what all of them would, if that takes too long.
                await self._relay(request, send, ASK_SECONDS if join and not name else None)
            else:
                await _respond(send, answer.status, answer.headers, answer.body)
        except AsyncLLMError as error:
            refused = _error_writer(path)(error)
            lines = [(k.lower().encode(), v.encode("latin-1")) for k, v in refused.headers.items()]
            await _respond(send, refused.status, lines, refused.body)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has left.

        Raises:
            HttpError: it is too long, or takes too long.
        """
        body = bytearray()
        seconds, most = self._server.request_seconds, self._server.max_body_bytes
        try:
            async with asyncio.timeout(seconds):
                while len(body) <= most:  # the replica refuses what is longer
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(f"the body has not arrived within {seconds:g} s", 408) from None
        return bytes(body)

    async def _ask_all(
        self, request: Request, name: str, join: Callable[[Answers], Answer | None]
    ) -> Answer | None:
        """None: one replica should answer."""
        if request.method == b"HEAD":  # the proxy leaves the body out
            request = msgspec.structs.replace(request, method=b"GET")
        if name:
            sought = (SEEK.lower().encode(), quote(name).encode())
            request = msgspec.structs.replace(request, headers=[*request.headers, sought])
        answers = await ask_all(self._replicas, request, name)
        return None if answers is None else join(answers)

    async def _relay(self, request: Request, send: Send, seconds: float | None) -> None:
        """
        Args:
            seconds: how long a replica may take to begin its answer.

        Raises:
            EngineDead: replicas died before one answered.
            NotReady: a replica takes too long.
        """
        for _ in range(_ATTEMPTS):
            answer = self._replicas.answer.remote(request)
            try:
                async with asyncio.timeout(seconds):
                    status, headers = await anext(answer)
            except (RayActorError, EngineDead) as error:
                log.warning("a replica died before it answered: %s", error)
                if isinstance(error, EngineDead):
                    await asyncio.sleep(ENDING_SECONDS)
                continue
            except TimeoutError:
                answer.cancel()
                raise NotReady("a replica does not answer; try again") from None
            except BaseException:
                answer.cancel()
                raise
            kept = [header for header in headers if header[0].lower() not in _NOT_PASSED_ON]
            await send({"type": "http.response.start", "status": status, "headers": kept})
            await self._pass_on(answer, dict(headers).get(_LAST_WORDS), send)
            return
        raise EngineDead(LOST.message)

    async def _pass_on(
        self, answer: DeploymentResponseGenerator[Any], last_words: bytes | None, send: Send
    ) -> None:
        try:
            async for part in answer:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except RayActorError as error:
            log.warning("a replica died while it answered: %s", error)
            if last_words is None:
                raise  # the client gets half an answer; only Ray Serve can tell it so
            end = b64decode(last_words)
            await send({"type": "http.response.body", "body": end, "more_body": True})
        finally:
            answer.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _request(scope: Message, path: str, body: bytes) -> Request:
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    kept = [header for header in headers if header[0].lower() not in _NOT_SENT_ON]
    if body:
        kept.append((b"content-length", b"%d" % len(body)))
    peer = scope.get("client")
    method = scope["method"].encode("latin-1")
    known = None if peer is None else tuple(peer)
    return Request(method, target_of(scope), path, kept, body, known)


def _error_writer(path: str) -> ErrorWriter:
    return next(
        (w for root, w in ROOTS.items() if f"{path}/".startswith(f"{root}/")), error_response
    )


async def _respond(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: object
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


_ASKS: Final = {(one.method, one.path): one.asks for one in (*ROUTES, RELOAD) if one.asks}
_NAMED: Final = re.compile(r"/v1/requests/(.+)/(?:trace|abort)")
_RESPONSES: Final = frozenset(("/v1/responses", "/v1/responses/compact"))
#: How long all of them may take, asked how they are, or anything else; after that, one is asked.
PROBE_SECONDS: Final = 1.0
ASK_SECONDS: Final = 5.0

#: Each replica's name, and what it says; None if it says nothing.
Answers = dict[str, Answer | None]


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


class _Body(msgspec.Struct):
    """Of a response: what says which replica has what it continues."""

    input: list[_Item]


_BODY: Final = msgspec.json.Decoder(_Body)


def joined(method: str, path: str, name: str) -> Callable[[Answers], Answer | None] | None:
    """How to answer what concerns all replicas; None: one of them answers.

    Args:
        name: of what only one of them has, see ``name_in``.
    """
    known = _ASKS.get(("GET" if method == "HEAD" else method, path))
    if known == "metrics":
        return _metrics
    if known is None and not name:
        return None
    merge = MERGES[known or "seek"]
    return lambda answers: merge(list(answers.values()))


def name_in(request: Request) -> str:
    """Of another request, or of an item of a response; empty if the request names none.

    Items that replicas have named themselves say where they are, see ``home_of``.
    """
    found = _NAMED.fullmatch(request.path)
    if found is not None:
        return found[1]
    if request.path not in _RESPONSES or home_of(request.path, request.body) is not None:
        return ""
    try:
        items = _BODY.decode(request.body).input
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # a text, or what the replica refuses
    referred = (
        one.id for one in items if one.type in ("item_reference", None) and one.role is None
    )
    return min((id for id in referred if isinstance(id, str)), default="")


async def ask_all(
    replicas: DeploymentHandle[Replica], request: Request, name: str
) -> Answers | None:
    """None if they take too long, and one can answer as well.

    Raises:
        NotReady: there is none, or those that there are take too long.
    """
    seconds = PROBE_SECONDS if request.path in PROBES else ASK_SECONDS
    try:
        asked = replicas.broadcast("whole_answer", request)
        found: Sequence[tuple[str, Answer] | Exception]
        found = await asked.results_async(timeout_s=seconds, return_exceptions=True)
    except DeploymentUnavailableError:
        raise NotReady("no replica is ready") from None
    except TimeoutError:
        if request.path == RELOAD.path or name:
            raise NotReady("a replica does not answer; try again") from None
        return None
    return dict(
        (f"failed {i}", None) if isinstance(one, Exception) else one for i, one in enumerate(found)
    )


def _metrics(answers: Answers) -> Answer | None:
    known = {name: answer for name, answer in answers.items() if answer is not None}
    if (found := first(list(known.values()))) is None or found.status != 200:
        return found
    text = labelled({name: answer.body.decode() for name, answer in known.items()})
    return found._replace(body=text.encode())
