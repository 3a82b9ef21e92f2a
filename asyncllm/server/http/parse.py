"""From the bytes of a request body to a Struct: parsed and checked strictly, in bounded time.

Also the fields that the Struct does not have: unknown ones, and those that are not supported yet.
"""

from __future__ import annotations

import functools
import gc
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar, get_args

import msgspec
import numpy as np

from asyncllm.errors import BadRequest
from asyncllm.server.http.answer import encode

T = TypeVar("T", bound=msgspec.Struct)

#: Strings, arrays and objects of one body. Making so many takes tens of milliseconds, in which the
#: event loop does nothing else. The largest number of messages, 8192, may have 16 each.
MAX_PARTS: Final = 2**17
#: Values of one body. When there are so many, most are numbers: the token ids of prompts.
MAX_VALUES: Final = 5 * 2**18

#: Bodies of at least so many bytes may become enough objects to trigger garbage collections.
_LARGE: Final = 4096
#: Bodies of at most so many bytes are small enough for Python to look at each value.
_THOROUGH: Final = 2**18

#: Most names that are reported, so that no client decides how long a header gets.
MAX_NAMES: Final = 16
_MAX_NAME: Final = 64

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")

#: Fields that this server cannot honour yet, with the values, besides null, that ask for nothing.
#: Ignoring any other value would give a different answer than the client wants.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora_path": (),
    "moderation": (),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "stop_regex": ([],),
    "suffix": ("",),
}
_WHERE: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(.*?)`")
_WRONG_CHOICE: Final = "Invalid enum value"
#: A field's name, or an index with its brackets.
_STEP: Final = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
_FLOAT_FOR_INT: Final = re.compile(r"^Expected `int\b.*`, got `float` - at `\$\.(\w+)[\w.]*(\[?)")

#: A quote that is written as an escape; its backslash is not escaped itself.
_ESCAPED_QUOTE: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0022")
#: Up to an escape that is half of a surrogate pair, in time linear in the text.
_WHOLE_TEXT: Final = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

_decode = msgspec.json.Decoder().decode


def parse(body: bytearray, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """A JSON object as a checked Struct, and as a dict.

    Raises:
        BadRequest: malformed, ambiguous, or more than the event loop can wait for; or a field is
            missing or of the wrong type, which ``param`` names.
    """
    _check_size(body)
    if not body or body.isspace():
        raise BadRequest("the body is empty; it must be a JSON object")
    try:
        if len(body) < _LARGE:
            return _parse(body, kind)
        with _no_collection():
            return _parse(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(error, kind) from None
    except msgspec.DecodeError as error:
        problem = _half_a_pair(body) or error
        raise BadRequest(f"the body is not valid JSON: {problem}") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> BadRequest:
    """msgspec's finding as a BadRequest: ``$.messages[0].role`` becomes the param.

    Args:
        kind: the type that the value was to have.
    """
    message = str(error)
    where = _WHERE.search(message)
    path = where[1].removesuffix("[...]") if where else ""
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{path} is required", param=path)
    text = message[: where.start()] if where else message
    if text.startswith(_WRONG_CHOICE) and (
        choices := _choices(_type_info(kind), _STEP.findall(path))
    ):
        text += f": it is one of {', '.join(choices)}"
    return BadRequest(f"{path}: {text}" if path else text, param=path or None)


#: Of a Struct; that takes a millisecond the first time.
_type_info = functools.cache(msgspec.inspect.type_info)


def _choices(info: msgspec.inspect.Type, path: list[str]) -> list[str]:
    """The possible texts of the field at a path, if it has to be one of some."""
    match info:
        case msgspec.inspect.UnionType(types=types):
            return [choice for one in types for choice in _choices(one, path)]
        case msgspec.inspect.Metadata(type=inner):
            return _choices(inner, path)
        case msgspec.inspect.LiteralType(values=values) if not path:
            return [value for value in values if isinstance(value, str)]
        case msgspec.inspect.ListType(item_type=item) if path and path[0].startswith("["):
            return _choices(item, path[1:])
        case msgspec.inspect.StructType(fields=fields) if path:
            named = (field.type for field in fields if field.encode_name == path[0])
            return [choice for inner in named for choice in _choices(inner, path[1:])]
    return []


def _parse(body: bytearray, kind: type[T]) -> tuple[T, dict[str, Any]]:
    thorough = len(body) <= _THOROUGH
    try:
        fields = _decode(body)
    except msgspec.ValidationError:  # a number out of range
        msgspec.json.decode(body, type=kind)  # the same error, with the field's name
        raise
    # The decoder keeps the last of equal keys, and the others' quotes are missing then.
    quotes = body.count(b'"')
    if b"\\u0022" in body:
        quotes += len(_ESCAPED_QUOTE.findall(body))
    if encode(fields).count(b'"') < quotes:
        if thorough:
            json.loads(body, object_pairs_hook=_unique)
        raise BadRequest("a key is given twice in one object")
    return _convert(fields, kind, thorough), fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key, count in times.items() if count > 1)
        raise BadRequest(f"{twice} is given twice", param=twice)
    return found


def _convert(fields: Any, kind: type[T], thorough: bool) -> T:
    """Checks the fields. Takes 16.0 for 16 where an integer is expected: Gson, Kotlin and Lua write
    integers so that went through a double.

    Args:
        thorough: whether to convert lists of numbers, too.
    """
    converted = set[str]()
    while True:
        try:
            return msgspec.convert(fields, kind, str_keys=True)
        except msgspec.ValidationError as error:
            found = _FLOAT_FOR_INT.search(str(error))
            if found is None or found[1] in converted or (found[2] and not thorough):
                raise
            converted.add(found[1])
            fields = {**fields, found[1]: _integral(fields[found[1]])}


def _integral(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_integral(item) for item in value]
    if isinstance(value, dict):
        return {key: _integral(item) for key, item in value.items()}
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """Decoding makes no cycles; looking for them again and again would take longest of all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _half_a_pair(body: bytearray) -> str | None:
    """Where an escaped surrogate stands alone: msgspec finds it, but does not say so."""
    before = _WHOLE_TEXT.match(body)
    at = 0 if before is None else before.end()
    alone = bytes(body[at : at + 6])
    if _SURROGATE.fullmatch(alone) is None:
        return None
    return f"the surrogate {alone.decode()} at byte {at} is half of a pair"


def _check_size(body: bytearray) -> None:
    """
    Raises:
        BadRequest: parsed, it would be more objects than the event loop can wait for.
    """
    # Each part takes two bytes at least: its brackets or quotes, or a digit and a comma.
    if len(body) < 2 * MAX_PARTS or _too_many(body) is None:
        return
    # Some of what was counted may be inside strings: count again without their contents.
    plain = bytes(body)
    if b"\\" in plain:
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MAX_PARTS:
        plain = b'""'.join(plain.split(b'"')[::2])
    if (problem := _too_many(plain)) is not None:
        raise BadRequest(problem)


def _too_many(text: bytes | bytearray) -> str | None:
    """What a JSON text has too much of, if every bracket and comma is outside strings."""
    codes = np.frombuffer(text, np.uint8)
    brackets = np.count_nonzero((codes | 0x20) == ord("{"))  # that is, { or [
    if np.count_nonzero(codes == ord('"')) // 2 + brackets > MAX_PARTS:
        return f"the body has more than {MAX_PARTS} strings, arrays and objects"
    if len(text) >= 2 * MAX_VALUES and np.count_nonzero(codes == ord(",")) > MAX_VALUES:
        return f"the body has more than {MAX_VALUES} values"
    return None


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """
    Raises:
        BadRequest: one of the fields asks for something that is not supported.
    """
    for name, harmless in UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")


def unknown_fields(
    fields: Mapping[str, Any], struct: msgspec.Struct, where: str = ""
) -> Iterator[str]:
    """Paths of the fields that the Struct made from them does not have, in their order.

    Structs inside are looked into, also those in lists. Free-form objects, like the messages that
    are handed to the chat template as they are, have no unknown fields.
    """
    names = _names(type(struct))
    if not fields.keys() <= names:
        yield from (where + name for name in fields if name not in names)
    for attribute, name in _nesting(type(struct)):
        if name in fields:
            yield from _inside(fields[name], getattr(struct, attribute), where + name)


def _inside(value: Any, parsed: Any, where: str) -> Iterator[str]:
    if isinstance(parsed, msgspec.Struct):
        yield from unknown_fields(value, parsed, where + ".")
    elif isinstance(parsed, (list, tuple)):
        for i, item in enumerate(parsed):
            yield from _inside(value[i], item, f"{where}[{i}]")


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    tag = kind.__struct_config__.tag_field
    return frozenset((*kind.__struct_encode_fields__, *([tag] if tag else [])))


@cache
def _nesting(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The fields that may hold Structs: name of the attribute, name in JSON."""
    fields = msgspec.structs.fields(kind)
    return tuple((f.name, f.encode_name) for f in fields if _may_hold_struct(f.type))


def _may_hold_struct(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return True
    return any(_may_hold_struct(inner) for inner in get_args(hint))


def ignored_header(names: Iterable[str]) -> str:
    """The names as the value of a header: bounded, and of harmless characters only."""
    first = list(islice(names, MAX_NAMES + 1))
    shown = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in first[:MAX_NAMES]]
    return ", ".join(shown + ["..."] * (len(first) > MAX_NAMES))
