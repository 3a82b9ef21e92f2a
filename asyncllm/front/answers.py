"""One answer of several replicas' answers."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: Of what a replica says of itself, what all together are: the first that there is.
_STATES: Final = ("ok", "idle", "draining", "loading", "stalled", "dead")
#: Headers of a replica's answer that say how it was sent; the rest are the client's to see.
_OF_SENDING: Final = frozenset((b"content-length", b"connection", b"keep-alive"))
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class Answer(NamedTuple):
    """What a replica answers, or several together.

    Attributes:
        headers: names, in lower case, and values; without those that say how it is sent.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return found if isinstance(found, dict) else {}


def of_headers(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Answer:
    """Of an answer that is whole, with headers of all kinds."""
    lower = ((name.lower(), value) for name, value in headers)
    return Answer(status, tuple(one for one in lower if one[0] not in _OF_SENDING), body)


def read_answer(data: bytes) -> Answer | None:
    """Of a connection that has ended; None if it is not whole."""
    head, end, body = data.partition(b"\r\n\r\n")
    start, *lines = head.split(b"\r\n")
    if not end or not start[9:12].isdigit():
        return None
    split = (line.partition(b":") for line in lines)
    headers = [(name.lower(), value.strip()) for name, _, value in split]
    length = dict(headers).get(b"content-length", b"")
    if length.isdigit() and len(body) < int(length):
        return None
    return of_headers(int(start[9:12]), headers, body)


def as_bytes(answer: Answer, *, with_body: bool, is_last: bool) -> bytes:
    """The whole of HTTP's answer."""
    start = f"HTTP/1.1 {answer.status} {_PHRASES.get(answer.status, '')}".encode()
    lines = [start, *(name.title() + b": " + value for name, value in answer.headers)]
    lines.append(b"Content-Length: %d" % len(answer.body))
    if is_last:
        lines.append(b"Connection: close")
    return b"\r\n".join((*lines, b"", b"")) + (answer.body if with_body else b"")


def health(answers: Sequence[Answer | None]) -> Answer | None:
    """Alive as long as one of them is."""
    if (refusal := _refusal(answers)) is not None:
        return refusal
    bodies = [{"status": "dead"} if answer is None else answer.json() for answer in answers]
    found = [body.get("status") for body in bodies]
    status = next((state for state in _STATES if state in found), "dead")
    whole: dict[str, Any] = {"status": status}
    whole |= {name: _sum(bodies, name) for name in ("steps_done", "running", "waiting")}
    if (best := first(answers)) is None:
        return None
    if best.status != 200:
        whole |= {"error": next((body["error"] for body in bodies if "error" in body), None)}
    return _json(best, {**whole, "replicas": bodies})


def ready(answers: Sequence[Answer | None]) -> Answer | None:
    """Requests are taken as long as one of them takes some."""
    if (refusal := _refusal(answers)) is not None:
        return refusal
    count = sum(answer is not None and answer.status == 200 for answer in answers)
    best = first(answers)
    if not count or best is None:
        return best
    return _json(best, {"status": "ready", "replicas": len(answers), "replicas_ready": count})


def load(answers: Sequence[Answer | None]) -> Answer | None:
    """The sum, and each one's."""
    like = worst(answers)
    if like is None or like.status != 200:
        return like
    bodies = [None if answer is None else answer.json() for answer in answers]
    known = [body for body in bodies if body is not None]
    names = dict.fromkeys(name for body in known for name in body)
    return _json(like, {**{name: _sum(known, name) for name in names}, "replicas": bodies})


def first(answers: Sequence[Answer | None]) -> Answer | None:
    """Of the replica that knows what is asked for; else of any."""
    given = [answer for answer in answers if answer is not None]
    return min(given, key=lambda answer: answer.status >= 400, default=None)


def worst(answers: Sequence[Answer | None]) -> Answer | None:
    """Of a replica that refuses; else of any."""
    given = [answer for answer in answers if answer is not None]
    return max(given, key=lambda answer: answer.status, default=None)


#: What all replicas are asked, by method and path.
ASKED: Final[dict[tuple[str, str], Callable[[Sequence[Answer | None]], Answer | None]]] = {
    ("GET", "/health"): health,
    ("GET", "/ping"): health,
    ("GET", "/ready"): ready,
    ("GET", "/load"): load,
    ("POST", "/admin/reload"): worst,
}
_NAMED: Final = re.compile(r"/v1/requests/.+/(?:trace|abort)")


def merger(method: str, path: str) -> Callable[[Sequence[Answer | None]], Answer | None] | None:
    """How to answer what concerns all replicas; None: one of them answers."""
    if method in ("GET", "POST") and _NAMED.fullmatch(path):
        return first
    return ASKED.get(("GET" if method == "HEAD" else method, path))


def _refusal(answers: Sequence[Answer | None]) -> Answer | None:
    """What says that the request is wrong, if it is."""
    given = (answer for answer in answers if answer is not None)
    return next((answer for answer in given if 400 <= answer.status < 500), None)


def _json(like: Answer, body: dict[str, Any]) -> Answer:
    """With the status and the headers of that answer, which is JSON too."""
    return like._replace(body=msgspec.json.encode(body))


def _sum(bodies: Sequence[dict[str, Any]], name: str) -> int:
    return sum(value for body in bodies if isinstance(value := body.get(name), int))
