"""One answer of several replicas' answers."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Of what a replica says of itself, what all together are: the first that there is.
_STATES: Final = ("ok", "idle", "draining", "loading", "stalled", "dead")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_TYPE: Final = re.compile(rb"\r\ncontent-type:[ \t]*([^\r]*)\r\n", re.IGNORECASE)


class Answer(NamedTuple):
    status: int
    content_type: bytes
    body: bytes

    def json(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return found if isinstance(found, dict) else {}


def read_answer(data: bytes) -> Answer | None:
    """Of a connection that has ended; None if it is not whole."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or not head[9:12].isdigit():
        return None
    length = _LENGTH.search(head + b"\r\n")
    if length is not None and len(body) < int(length[1]):
        return None
    found = _TYPE.search(head + b"\r\n")
    return Answer(int(head[9:12]), found[1] if found else b"", body)


def as_bytes(answer: Answer, *, with_body: bool, is_last: bool) -> bytes:
    """The whole of HTTP's answer."""
    reason = {200: "OK", 503: "Service Unavailable"}.get(answer.status, "Answer")
    head = (
        f"HTTP/1.1 {answer.status} {reason}\r\n"
        f"Content-Type: {answer.content_type.decode('latin-1')}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"X-Request-Id: {os.urandom(16).hex()}\r\n"
        "Server: asyncllm\r\n" + ("Connection: close\r\n" if is_last else "") + "\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")


def health(answers: Sequence[Answer | None]) -> Answer | None:
    """Alive as long as one of them is."""
    if (refusal := _refusal(answers)) is not None:
        return refusal
    bodies = [{"status": "dead"} if answer is None else answer.json() for answer in answers]
    found = [body.get("status") for body in bodies]
    status = next((state for state in _STATES if state in found), "dead")
    whole: dict[str, Any] = {"status": status}
    whole |= {name: _sum(bodies, name) for name in ("steps_done", "running", "waiting")}
    lives = any(answer is not None and answer.status == 200 for answer in answers)
    if not lives:
        whole |= {"error": next((body["error"] for body in bodies if "error" in body), None)}
    return _json(200 if lives else 503, {**whole, "replicas": bodies})


def ready(answers: Sequence[Answer | None]) -> Answer | None:
    """Requests are taken as long as one of them takes some."""
    if (refusal := _refusal(answers)) is not None:
        return refusal
    count = sum(answer is not None and answer.status == 200 for answer in answers)
    if not count:
        return first(answers)
    return _json(200, {"status": "ready", "replicas": len(answers), "replicas_ready": count})


def load(answers: Sequence[Answer | None]) -> Answer | None:
    """The sum, and each one's."""
    refused = worst(answers)
    if refused is None or refused.status != 200:
        return refused
    bodies = [None if answer is None else answer.json() for answer in answers]
    known = [body for body in bodies if body is not None]
    names = dict.fromkeys(name for body in known for name in body)
    return _json(200, {**{name: _sum(known, name) for name in names}, "replicas": bodies})


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


def _json(status: int, body: dict[str, Any]) -> Answer:
    return Answer(status, b"application/json; charset=utf-8", msgspec.json.encode(body))


def _sum(bodies: Sequence[dict[str, Any]], name: str) -> int:
    return sum(value for body in bodies if isinstance(value := body.get(name), int))
