"""As much of HTTP as it takes to choose a replica; the replica parses requests properly."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?=\r\n)", re.IGNORECASE)
_ANY_LENGTH: Final = re.compile(rb"\r\ncontent-length", re.IGNORECASE)
_ENCODED: Final = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade):", re.IGNORECASE)
_CONNECTION: Final = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
_CLOSES: Final = re.compile(rb"\r\nconnection:[^\r]*\bclose\b", re.IGNORECASE)

#: Ids of responses end with the replica that has them.
_RESPONSE: Final = re.compile(rb"/resp_[0-9a-f]{30}([0-9a-f]{2})(?=/|$)")
_PREVIOUS: Final = re.compile(rb'"previous_response_id"\s*:\s*"resp_[0-9a-f]{30}([0-9a-f]{2})"')
#: Ids of what a response consists of: the response's, and four digits.
_ITEM: Final = re.compile(rb'"id"\s*:\s*"[a-z]+_[0-9a-f]{30}([0-9a-f]{2})[0-9a-f]{4}"')
_BARE: Final = re.compile(rb"(?<!\r)\n")


class Head(NamedTuple):
    """What a request begins with.

    Attributes:
        method, path: empty for what is not HTTP; the path is without its query.
        num_bytes: of the head.
        body_bytes: of the body; None if the head does not say it, or it is not to be waited for.
        is_last: the client does not use the connection after it.
    """

    method: str
    path: str
    num_bytes: int
    body_bytes: int | None
    is_last: bool


def read_head(data: bytes | bytearray) -> Head | None:
    """None: it has not ended yet, or is not well-formed."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(data[: end + 2])
    line = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
    method, path, version = line if len(line) == 3 else ("", "", "")
    lengths = _LENGTH.findall(head)
    body_bytes: int | None = int(lengths[0]) if lengths else 0
    if len(_ANY_LENGTH.findall(head)) != len(lengths) or len(lengths) > 1 or _ENCODED.search(head):
        body_bytes = None
    is_last = version != "HTTP/1.1" or _CLOSES.search(head) is not None
    return Head(method, path.partition("?")[0], end + 4, body_bytes, is_last)


def is_malformed(head: bytes) -> bool:
    """Whether a line of it does not end as HTTP's do; such a head may have no end either."""
    return _BARE.search(head) is not None


def home_of(path: str, body: bytes) -> int | None:
    """The replica that has the response which is named in the path, or is to be continued.

    It may also be continued by naming what it consists of.
    """
    if not path.startswith("/v1/responses"):
        return None
    found = _RESPONSE.search(path.encode()) or _PREVIOUS.search(body) or _ITEM.search(body)
    return None if found is None else int(found[1], 16)


def closing(request: bytes) -> bytes:
    """The same request, for a connection that ends with its answer, which has a body."""
    head, _, body = request.partition(b"\r\n\r\n")
    head = _CONNECTION.sub(b"", head)
    if head.startswith(b"HEAD "):
        head = b"GET " + head.removeprefix(b"HEAD ")
    return head + b"\r\nConnection: close\r\n\r\n" + body
