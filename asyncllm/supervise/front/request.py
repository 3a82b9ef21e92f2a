"""What the front reads of a request, to choose a replica well. What it means, replicas decide.

A replica gets the connection with the request, and parses it as if it had accepted it. So nothing
here has to be right but one thing: what ``Head.probe`` says must be what every replica would say.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: A head that is longer is not read here.
MOST_HEAD: Final = 16 * 1024

_HEAD: Final = re.compile(
    rb"([A-Z]+) (/[!-~]*) (HTTP/1\.[01])\r\n"
    rb"((?:[\w!#$%&'*+.^`|~-]+:[\t\x20-\x7e\x80-\xff]*\r\n)*)\r\n"
)
_LENGTH: Final = re.compile(rb"\d{1,15}")
#: With one of these, the end of a body is not to be found by its length, or it comes later.
_FRAMING: Final = frozenset((b"transfer-encoding", b"expect", b"upgrade"))

#: What the front asks all replicas itself, so that a replica that hangs delays nobody; by path.
PROBES: Final = {"/health": "health", "/ping": "health", "/ready": "ready", "/load": "load"}
#: Headers of probes: all that those who probe send, and nothing that changes how a request is read.
_OF_PROBES: Final = frozenset(
    b"host connection user-agent accept accept-encoding accept-language authorization x-api-key "
    b"x-request-id cache-control pragma origin referer cookie traceparent tracestate forwarded via "
    b"x-forwarded-for x-forwarded-host x-forwarded-port x-forwarded-proto x-real-ip".split()
)

#: Replicas have numbers below this.
MOST_REPLICAS: Final = 256
#: Paths whose bodies say which replica is best.
_PROMPTS: Final = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"),
        *("/v1/responses", "/v1/responses/compact"),
        *("/generate", "/api/chat", "/api/generate", "/api/embed"),
    )
)
#: Numbers of the live view say their replica by the rest of a division.
_LIVE: Final = re.compile(r"/live/(\d{1,18})/")
#: Ids of responses end with the replica that has them.
_RESPONSE: Final = re.compile(rb"/resp_[0-9a-f]{30}([0-9a-f]{2})(?=/|$)")
_PREVIOUS: Final = re.compile(rb'"previous_response_id"\s*:\s*"resp_[0-9a-f]{30}([0-9a-f]{2})"')
#: Ids of what a response consists of: the response's, and four digits.
_ITEM: Final = re.compile(rb'"id"\s*:\s*"[a-z]+_[0-9a-f]{30}([0-9a-f]{2})[0-9a-f]{4}"')


class Head(NamedTuple):
    """What a request begins with.

    Attributes:
        num_bytes: of the head.
        path: without its query; empty for a head that is unusual in any way.
        body_bytes: of the body; None if that is not known.
        has_prompt: the body is worth waiting for: it says which replica is best.
        probe: which of ``PROBES`` it asks for; empty if that, or what else it says, is not certain.
        host: of a probe, as the Host header says it.
        version: of HTTP.
        is_last: of a probe, whether the connection ends with its answer.
    """

    num_bytes: int
    path: str = ""
    body_bytes: int | None = None
    has_prompt: bool = False
    probe: str = ""
    host: str = ""
    version: str = "HTTP/1.1"
    is_last: bool = True


def read_head(data: bytes) -> Head:
    """
    Args:
        data: of a whole head, with the empty line that ends it.
    """
    found = _HEAD.fullmatch(data) if len(data) <= MOST_HEAD else None
    if found is None:
        return Head(len(data))
    method, target, version, lines = found.groups()
    fields = [line.partition(b":")[::2] for line in lines.split(b"\r\n")[:-1]]
    named = {name.lower(): value.strip() for name, value in fields}
    path = target.partition(b"?")[0].decode()
    body_bytes: int | None = None
    if not named.keys() & _FRAMING:
        length = named.get(b"content-length", b"0")
        lengths = [name for name, _ in fields if name.lower() == b"content-length"]
        body_bytes = int(length) if len(lengths) < 2 and _LENGTH.fullmatch(length) else None
    is_known = data.isascii() and len(named) == len(fields) and named.keys() <= _OF_PROBES
    connection = named.get(b"connection", b"").lower()
    if version == b"HTTP/1.1":
        is_known &= bool(named.get(b"host")) and connection in (b"", b"keep-alive", b"close")
    else:
        is_known &= b"connection" not in named
    probe = PROBES.get(path, "") if is_known and method in (b"GET", b"HEAD") else ""
    is_last = version != b"HTTP/1.1" or connection == b"close"
    host = named.get(b"host", b"").decode() if probe else ""
    return Head(
        *(len(data), path, body_bytes, path in _PROMPTS),
        *(probe, host, version.decode()),
        is_last=is_last,
    )


def home_of(path: str, body: bytes) -> int | None:
    """The replica that probably has what the request names.

    That is a number of the live view, or a response, also by the id of what it consists of.
    """
    if (live := _LIVE.match(path)) is not None:
        return int(live[1]) % MOST_REPLICAS
    if not path.startswith("/v1/responses"):
        return None
    found = _RESPONSE.search(path.encode()) or _PREVIOUS.search(body) or _ITEM.search(body)
    return None if found is None else int(found[1], 16)


def closing(probe: bytes) -> bytes:
    """A probe's request, for a connection that ends with its answer, which has a body."""
    lines = probe.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines[1:] if not line.lower().startswith(b"connection:")]
    start = b"GET " + lines[0].partition(b" ")[2]
    return b"\r\n".join((start, *kept, b"Connection: close", b"", b""))
