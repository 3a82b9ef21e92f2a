"""Checks for structs that users construct, as their fields declare them.

msgspec only checks what it decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest

T = TypeVar("T")

#: What msgspec checks of ``Meta``.
_BOUNDS: Final = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")
#: An IPv6 address is in brackets.
_TCP_ENDPOINT: Final = re.compile(r"tcp://(?:\*|[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})")


class Range(NamedTuple):
    """A rule: what a number may be; the least one may be left out."""

    least: float
    most: float
    is_open: bool = False

    def __call__(self, name: str, value: float) -> None:
        if not (value > self.least or (value == self.least and not self.is_open)):
            wrong = f"{'above' if self.is_open else 'at least'} {self.least:,}"
        elif not value <= self.most:
            wrong = f"at most {self.most:,}"
        else:
            return
        raise BadRequest(f"{name} must be {wrong}, not {value}", param=name)


def bounds(least: float, most: float, expected: str = "", *, is_open: bool = False) -> Meta:
    """A rule as ``Range``, which the description of the HTTP API has, too.

    msgspec does not check it, as its message would tell one bound only.

    Args:
        expected: both bounds in words, for errors.
    """
    words = expected or f"between {least} and {most}"

    def check(name: str, value: float) -> None:
        if not least <= value <= most or (is_open and value == least):
            raise BadRequest(f"{name} must be {words}", param=name)

    lower = "exclusiveMinimum" if is_open else "minimum"
    return Meta(extra_json_schema={lower: least, "maximum": most}, extra={"rule": check})


class Form(NamedTuple):
    """A rule: the pattern of a text, or of each of several, and what errors say of it."""

    pattern: str
    expected: str

    def __call__(self, name: str, value: str | tuple[str, ...]) -> None:
        for text in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(self.pattern, text):
                raise BadRequest(f"{name} must be {self.expected}, not {text!r}", param=name)


def not_empty(name: str, value: str | tuple[str, ...]) -> None:
    """A rule: a text, or each of several, has a character."""
    if "" in ((value,) if isinstance(value, str) else value):
        raise BadRequest(f"{name} must not be empty", param=name)


def type_of(hint: Any) -> tuple[Any, list[Any]]:
    """A field's type, without None and annotations; and the annotations."""
    extras: list[Any] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            extras += more
            continue
        members = [m for m in get_args(hint) if m is not type(None)]
        if len(members) == len(get_args(hint)) or len(members) != 1:
            return hint, extras
        [hint] = members


class _Field(NamedTuple):
    """``plain`` is the type of values that msgspec has nothing to check of."""

    name: str
    type: Any
    plain: Any
    default: Any
    rules: list[Callable[[str, Any], None]]


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[_Field, ...]:
    found = []
    for field in msgspec.structs.fields(kind):
        plain, extras = type_of(field.type)
        metas = [extra for extra in extras if isinstance(extra, Meta)]
        rules = [extra for extra in extras if callable(extra)]
        rules += [meta.extra["rule"] for meta in metas if meta.extra and "rule" in meta.extra]
        if any(getattr(meta, bound) is not None for meta in metas for bound in _BOUNDS):
            plain = None
        found.append(_Field(field.encode_name, field.type, plain, field.default, rules))
    return tuple(found)


def check_fields(struct: msgspec.Struct, where: str = "") -> None:
    """Check every field against its annotation, with the bounds in ``Meta``, and by its rules.

    A rule is what else ``Annotated`` has that can be called, with name and value, or ``bounds``.
    Values that msgspec can convert (a list for a tuple, a Decimal for a float) are converted in
    place. Defaults are not checked, to save time.

    Args:
        where: the field of another struct that holds this one; errors name it.

    Raises:
        BadRequest: a value does not fit; ``param`` names the field.
    """
    for name, kind, plain, default, rules in _fields(type(struct)):
        value = getattr(struct, name)
        if value is default:
            continue
        if type(value) is not plain:
            try:
                converted = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                path = f"{where}.{name}" if where else name
                raise BadRequest(f"{path}: {error}", param=path) from None
            if converted is not value:
                msgspec.structs.force_setattr(struct, name, value := converted)
        if value is not None:
            for rule in rules:
                rule(name, value)


def check_kind(name: str, value: object, kind: type[T]) -> T | None:
    """Return an argument that is None or of the right type.

    Raises:
        BadRequest: it is neither; the message has the parameter, the expected and the given type.
    """
    if value is None or isinstance(value, kind):
        return value
    hint = f"; use {kind.__name__}(**{name})" if isinstance(value, dict) else ""
    raise BadRequest(
        f"{name} must be {kind.__name__}, not {type(value).__name__}{hint}", param=name
    )


def check_tcp_endpoint(name: str, value: str) -> None:
    """A rule: the address of a ZMQ socket, whose next port is used, too."""
    found = _TCP_ENDPOINT.fullmatch(value)
    if found is None or not 0 < int(found[1]) < 65535:
        raise BadRequest(
            f"{name} must be tcp://HOST:PORT or tcp://*:PORT, with a port from 1 to 65534, not "
            f"{value!r}",
            param=name,
        )
