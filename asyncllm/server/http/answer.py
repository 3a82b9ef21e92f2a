"""Answers in JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import Payload, web
from aiohttp.abc import AbstractStreamWriter

T = TypeVar("T")

encode = msgspec.json.Encoder().encode

#: Bytes that are written at once: transports may copy what they cannot send.
PIECE_BYTES: Final = 64 * 1024
#: Elements of a list that are encoded at once. The encoder holds the GIL, also in a thread.
SLICE: Final = 256


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What all of them share: no field that is not written down here."""


def _as_it_is(item: T) -> T:
    return item


class _Pieces(Payload):
    """A long body, written piece by piece as the client takes it."""

    _default_content_type = "application/json"
    _value: bytes

    def __init__(self, body: bytes):
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                await writer.write(view[start : start + PIECE_BYTES])
        finally:
            self._value = b""  # an idle connection keeps its last answer


def json_body(
    body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """An answer that is encoded already."""
    kind = "application/json"
    if len(body) <= PIECE_BYTES:
        return web.Response(body=body, status=status, headers=headers, content_type=kind)
    headers = {**(headers or {}), "Content-Length": str(len(body))}  # aiohttp knows it too late
    return web.Response(body=_Pieces(body), status=status, headers=headers, content_type=kind)


def json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return json_body(encode(body), status=status, headers=headers)


def encode_with(body: msgspec.Struct, name: str, items: Iterable[bytes]) -> bytes:
    """``body`` with ``items``, which are encoded already, in its list ``name``, which is empty."""
    before, empty, after = encode(body).partition(b'"%b":[]' % name.encode())
    assert empty, f"{name} is an empty list"
    return b"".join((before, empty[:-1], b",".join(items), b"]", after))


def in_slices(items: Sequence[T], write: Callable[[T], Any] = _as_it_is) -> Any:
    """What ``write`` makes of each item, to be encoded as a list; of many, JSON already."""
    if len(items) <= SLICE:
        return list(map(write, items))
    starts = range(0, len(items), SLICE)
    slices = (encode(list(map(write, items[start : start + SLICE])))[1:-1] for start in starts)
    return msgspec.Raw(b"[%b]" % b",".join(slices))
