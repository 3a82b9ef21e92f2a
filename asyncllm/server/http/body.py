"""From the bytes of a request to its Struct: read within bounds, parsed once, checked strictly."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from aiohttp import web

from asyncllm.errors import BadRequest, TooLarge
from asyncllm.server.http.errors import HttpError
from asyncllm.server.http.json_limits import refuse_too_many, says_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from asyncllm.server.http.bodies import Bodies

T = TypeVar("T", bound=msgspec.Struct)

_WHERE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(.*?)`")
_FLOAT_FOR_INT: Final = re.compile(r"^Expected `int\b.*`, got `float` - at `\$\.(\w+)[\w.]*(\[?)")

#: What aiohttp takes off before we see a body; clients may not ask for more.
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))

#: Bytes of a body from which on it may become enough objects for garbage collections to matter.
_LARGE: Final = 4096

#: And up to which there is time for Python to look at each of its values.
_THOROUGH: Final = 2**18

#: Up to an escape that is half of a surrogate pair, in time linear in the text.
_WHOLE_TEXT: Final = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_decode = msgspec.json.Decoder().decode


@asynccontextmanager
async def read_body(
    request: web.Request, bodies: Bodies, limit: int, seconds: float
) -> AsyncIterator[bytearray]:
    """The request's body, whatever its Content-Type claims to be; drop it with the context.

    The limit is ours, not aiohttp's: in a mounted app that one belongs to the host.

    Raises:
        TooLarge: it has more than ``limit`` bytes, after decompression.
        HttpError: it has not arrived within ``seconds``, or is in an encoding we do not know, or
            there is no room for it beside other bodies.
        BadRequest: it breaks the rules of HTTP.
    """
    encoding = request.headers.get("Content-Encoding", "").lower()
    if encoding not in _ENCODINGS:
        raise HttpError("the Content-Encoding is not supported", 415)
    if (request.content_length or 0) > limit:
        raise TooLarge(f"the body exceeds {limit} bytes")
    is_here = request.content.is_eof()  # it came with the header, or right after: most do
    known = None if encoding not in ("", "identity") else request.content_length
    held = await bodies.take(0 if is_here else limit if known is None else known)
    try:
        try:
            if is_here:
                body = bytearray(request.content.read_nowait())
            else:
                body = await _receive(request, limit, seconds)
        except web.RequestPayloadError as error:
            raise BadRequest("the body cannot be read") from error
        if len(body) > limit:
            raise TooLarge(f"the body exceeds {limit} bytes")
        yield body
    finally:
        bodies.give_back(held)


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
    """A JSON object as a checked Struct; and as a dict, unless the Struct has all of it.

    Raises:
        BadRequest: malformed, ambiguous, or more than the event loop can wait for; or a field is
            missing or of the wrong type, which ``param`` names.
    """
    refuse_too_many(body)
    try:
        if len(body) < _LARGE:
            return _parse(body, kind)
        with _no_collection():
            return _parse(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except msgspec.DecodeError as error:
        problem = _half_a_pair(body) or error
        raise BadRequest(f"the body is not valid JSON: {problem}") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _half_a_pair(body: bytearray) -> str | None:
    """Where an escaped surrogate stands alone, which msgspec finds, but does not say so."""
    before = _WHOLE_TEXT.match(body)
    at = 0 if before is None else before.end()
    alone = bytes(body[at : at + 6])
    if _SURROGATE.fullmatch(alone) is None:
        return None
    return f"the surrogate {alone.decode()} at byte {at} is half of a pair"


def _parse(body: bytearray, kind: type[T]) -> tuple[T, dict[str, Any]]:
    try:
        struct = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        thorough = len(body) <= _THOROUGH
        if _with_float(error, thorough) is None:
            raise
        fields = _decode(body)
        struct = _convert(fields, kind, error, thorough)
    else:
        if says_all(struct, body):
            return struct, {}
        # Something was skipped, and not even checked.
        fields = _decode(body)
    if not says_all(fields, body):  # of two equal keys it has one
        if len(body) <= _THOROUGH:
            json.loads(body, object_pairs_hook=_unique)
        raise BadRequest("a key is given twice in one object")
    return struct, fields


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is decoded has no cycles; to look for them again and again would take longest of all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key, count in times.items() if count > 1)
        raise BadRequest(f"{twice} is given twice", param=twice)
    return found


def _convert(
    fields: dict[str, Any], kind: type[T], error: msgspec.ValidationError, thorough: bool
) -> T:
    """With 16.0 taken for 16 where an integer is expected: some languages write all numbers so.

    Args:
        error: what was found without that.
        thorough: whether to mend lists of numbers, too.

    Raises:
        msgspec.ValidationError: it does not help.
    """
    fields, mended = dict(fields), set[str]()
    while (name := _with_float(error, thorough)) is not None and name not in mended:
        mended.add(name)
        fields[name] = _integral(fields[name])
        try:
            return msgspec.convert(fields, kind, str_keys=True)
        except msgspec.ValidationError as another:
            error = another
    raise error


def _with_float(error: msgspec.ValidationError, thorough: bool) -> str | None:
    """The field of the request that has a float, in it somewhere, where an integer is expected."""
    found = _FLOAT_FOR_INT.search(str(error))
    return None if found is None or (found[2] and not thorough) else found[1]


def _integral(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_integral(item) for item in value]
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in value.items()}
    return value


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
