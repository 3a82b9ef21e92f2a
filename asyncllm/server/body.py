"""From the bytes of a request to its Struct: read within bounds, parsed once, checked strictly."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from asyncllm.errors import BadRequest, TooLarge
from asyncllm.server.errors import HttpError

T = TypeVar("T", bound=msgspec.Struct)

_WHERE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(.*?)`")

#: What aiohttp takes off before we see a body; clients may not ask for more.
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))

#: From so many bytes on, numpy counts faster than bytes do.
_LONG: Final = 4096

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


async def read_body(request: web.Request, limit: int, seconds: float) -> bytearray:
    """The request's body, whatever its Content-Type claims to be.

    The limit is ours, not aiohttp's: in a mounted app that one belongs to the host.

    Raises:
        TooLarge: it has more than ``limit`` bytes, after decompression.
        HttpError: it has not arrived within ``seconds``, or is in an encoding we do not know.
        BadRequest: it breaks the rules of HTTP.
    """
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in _ENCODINGS:
        raise HttpError("the Content-Encoding is not supported", 415)
    if (request.content_length or 0) > limit:
        raise TooLarge(f"the body exceeds {limit} bytes")
    try:
        if request.content.is_eof():  # it came with the header, or right after: most do
            body = bytearray(request.content.read_nowait())
        else:
            body = await _receive(request, limit, seconds)
    except web.RequestPayloadError as error:
        raise BadRequest("the body cannot be read") from error
    if len(body) > limit:
        raise TooLarge(f"the body exceeds {limit} bytes")
    return body


async def _receive(request: web.Request, limit: int, seconds: float) -> bytearray:
    """The body as it arrives, up to the chunk that exceeds the limit."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    break
    except TimeoutError:
        raise HttpError(f"the body has not arrived within {seconds:g} s", 408) from None
    return body


def parse(body: bytearray, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """A JSON object as a checked Struct, and as the dict it was made from.

    Raises:
        BadRequest: malformed, ambiguous, or a field is missing or of the wrong type; ``param``
            names it.
    """
    try:
        fields = _decode(body)
        if not isinstance(fields, dict):
            raise BadRequest("the body is not a JSON object")
        _refuse_duplicates(body, fields)
        return msgspec.convert(fields, kind, str_keys=True), fields
    except msgspec.ValidationError as error:
        raise _located(error, body, kind) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refuse_duplicates(body: bytearray, fields: dict[str, Any]) -> None:
    """Raise when an object has a key twice: a proxy may have checked the other one.

    Of such keys ``fields`` has the last one only. Written as JSON again it therefore has fewer
    quotes than the body, unless the body hides quotes in escapes. Counting them takes about as long
    as decoding; a decoder that looks at every object takes three times as long, and is only asked
    when the count leaves doubts.
    """
    if _count_quotes(body) != _count_quotes(_encode(fields)) or _hides_quotes(body):
        json.loads(body, object_pairs_hook=_unique)


def _count_quotes(text: bytes | bytearray) -> int:
    if len(text) < _LONG:
        return text.count(b'"')
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord('"')))


def _hides_quotes(text: bytearray) -> bool:
    if len(text) >= _LONG:
        codes = np.frombuffer(text, np.uint8)
        escapes = (codes[:-1] == ord("\\")) & (codes[1:] == ord("u"))
        if not escapes.any():
            return False
    return b"\\u0022" in text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadRequest(f"{key} is given twice", param=key)
        found[key] = value
    return found


def _located(error: msgspec.ValidationError, body: bytearray, kind: type[T]) -> BadRequest:
    """What is wrong; a number out of range is found before it is known whose value it is."""
    if "$[...]" in str(error):
        try:
            msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as better:
            error = better
        except (ValueError, RecursionError):
            pass
    return invalid(error)


def invalid(error: msgspec.ValidationError) -> BadRequest:
    """msgspec's finding as a BadRequest: ``$.messages[0].role`` becomes the param."""
    message = str(error)
    where = _WHERE.search(message)
    path = where[1].removesuffix("[...]") if where else ""
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{path} is required", param=path)
    text = message[: where.start()] if where else message
    return BadRequest(f"{path}: {text}" if path else text, param=path or None)
