"""One answer of several replicas' answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import msgspec

from asyncllm.errors import NotReady

#: Of what a replica says of itself, what all together are: the first that there is.
_STATES: Final = ("ok", "idle", "draining", "loading", "silent", "stalled", "dead")
_ALIVE: Final = _STATES[:4]
#: Of the view of all replicas: requests of each kind, and steps.
MOST_ROWS, MOST_STEPS = 128, 256
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


def as_bytes(
    answer: Answer, *, with_body: bool = True, is_last: bool = False, version: str = "HTTP/1.1"
) -> bytes:
    """The whole of HTTP's answer."""
    start = f"{version} {answer.status} {_PHRASES.get(answer.status, '')}".encode()
    lines = [start, *(name.title() + b": " + value for name, value in answer.headers)]
    lines.append(b"Content-Length: %d" % len(answer.body))
    if is_last and version == "HTTP/1.1":
        lines.append(b"Connection: close")
    return b"\r\n".join((*lines, b"", b"")) + (answer.body if with_body else b"")


def refusal(message: str) -> Answer:
    """503, in the place of an answer."""
    error = NotReady(message)
    detail = {"message": error.message, "type": error.type, "param": None, "code": error.code}
    return _made(503, {"error": detail})


class Known(NamedTuple):
    """What the front knows of a replica.

    Attributes:
        said: what the replica has said last, in JSON; empty before that.
        age: of it, in seconds.
        is_ready: it takes requests.
        leaves: it drains.
        hangs: it has not reacted for so long that it gets no requests.
    """

    said: bytes
    age: float
    is_ready: bool
    leaves: bool
    hangs: bool

    def instead(self, what: str) -> Answer:
        """In the place of its answer to a probe."""
        said = msgspec.json.decode(self.said) if self.said else {}
        if what == "ready":
            return _made(200, {"status": "ready"}) if self.is_ready else refusal("not ready")
        if what == "load":
            return _made(200, {"server_load": said.get("server_load", 0)})
        body = {"status": "loading", **said.get("health", {})}
        if self.hangs:
            body = {**body, **refusal("the replica does not react").json(), "status": "silent"}
        elif self.leaves and body["status"] in _ALIVE:
            body["status"] = "draining"
        body["age"] = round(self.age, 3)
        return _made(200 if body["status"] in _ALIVE else 503, body)


def health(answers: Sequence[Answer | None]) -> Answer | None:
    """Alive as long as one of them is."""
    if (refused := _refusal(answers)) is not None:
        return refused
    if (best := first(answers)) is None:
        return None
    bodies = [{"status": "dead"} if one is None else {"age": 0.0} | one.json() for one in answers]
    found = [body.get("status") for body in bodies]
    status = next((state for state in _STATES if state in found), "dead")
    whole: dict[str, Any] = {"status": status}
    whole |= {name: _sum(bodies, name) for name in ("steps_done", "running", "waiting")}
    if best.status != 200:
        whole |= {"error": next((body["error"] for body in bodies if "error" in body), None)}
    return _json(best, {**whole, "replicas": bodies})


def ready(answers: Sequence[Answer | None]) -> Answer | None:
    """Requests are taken as long as one of them takes some."""
    if (refused := _refusal(answers)) is not None:
        return refused
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
    """Of the first that does not refuse; else of any."""
    given = [answer for answer in answers if answer is not None]
    return min(given, key=lambda answer: answer.status >= 400, default=None)


def worst(answers: Sequence[Answer | None]) -> Answer | None:
    """Of a replica that refuses; else of any."""
    given = [answer for answer in answers if answer is not None]
    return max(given, key=lambda answer: answer.status, default=None)


def seek(answers: Sequence[Answer | None]) -> Answer | None:
    """Of the replica that got it last."""
    given = [answer for answer in answers if answer is not None]
    found = [answer for answer in given if answer.json().get("came") is not None]
    if found:
        return max(found, key=lambda answer: answer.json()["came"])
    like = worst(given)
    return like if like is None or like.status != 200 else _json(like, {"replica": None})


def live(answers: Sequence[Answer | None]) -> Answer | None:
    """The views of all in one, with counts added up; ``missing`` are those without an answer."""
    if (refused := _refusal(answers)) is not None:
        return refused
    like = first(answers)
    if like is None or like.status != 200:
        return like
    views = [one.json() for one in answers if one is not None and one.status == 200]
    shown = [replica for view in views for replica in view["replicas"]]
    whole = dict(views[0])
    for name, value in whole.items():
        each = [view[name] for view in views]
        if name.startswith(("num_", "max_")) or name == "totals":
            whole[name] = _added(each)
        elif isinstance(value, list):
            whole[name] = [one for part in each for one in part]
        elif isinstance(value, float):  # times
            whole[name] = max(each)
    whole["pages"] = _added([view["pages"] for view in views])
    whole["pages"]["page_size"] = views[0]["pages"]["page_size"]
    whole["draining"] = all(view["draining"] for view in views)
    for name in ("running", "waiting"):
        whole[name] = sorted(whole[name], key=lambda row: -row["age_ms"])[:MOST_ROWS]
    whole["ended"] = sorted(whole["ended"], key=lambda row: row["ended_ago_ms"])[:MOST_ROWS]
    whole["steps"] = sorted(whole["steps"], key=lambda step: step[1])[-MOST_STEPS:]
    whole["missing"] = [index for index in range(len(answers)) if index not in shown]
    return _json(like, whole)


def _added(values: Sequence[Any]) -> Any:
    """Numbers, or objects of numbers."""
    if not isinstance(values[0], dict):
        return sum(values)
    names = dict.fromkeys(name for value in values for name in value)
    return {name: _added([value[name] for value in values if name in value]) for name in names}


#: How the answers become one, by what is asked.
MERGES: Final[dict[str, Callable[[Sequence[Answer | None]], Answer | None]]] = {
    "health": health,
    "ready": ready,
    "load": load,
    "live": live,
    "reload": worst,
    "seek": seek,
}


def _refusal(answers: Sequence[Answer | None]) -> Answer | None:
    """What says that the request is wrong, if it is."""
    given = (answer for answer in answers if answer is not None)
    return next((answer for answer in given if 400 <= answer.status < 500), None)


def _json(like: Answer, body: dict[str, Any]) -> Answer:
    """With the status and the headers of that answer, which is JSON too."""
    return like._replace(body=msgspec.json.encode(body))


def _made(status: int, body: dict[str, Any]) -> Answer:
    headers = ((b"content-type", b"application/json"), (b"server", b"asyncllm"))
    return Answer(status, headers, msgspec.json.encode(body))


def _sum(bodies: Sequence[dict[str, Any]], name: str) -> int:
    return sum(value for body in bodies if isinstance(value := body.get(name), int))
