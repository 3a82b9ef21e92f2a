"""Checks for structs that users construct; msgspec only checks what it decodes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from asyncllm.errors import BadRequest

T = TypeVar("T")

#: An IPv6 address is in brackets.
_TCP_ENDPOINT: Final = re.compile(r"tcp://(?:\*|[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})")


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, Any], ...]:
    fields = msgspec.structs.fields(kind)
    return tuple((field.encode_name, field.type, field.default) for field in fields)


def check_types(struct: msgspec.Struct, where: str = "") -> None:
    """Check every field against its annotation, with the bounds in ``Meta``.

    Values that msgspec can convert (a list for a tuple, a Decimal for a float) are converted in
    place. Defaults are not checked, to save time.

    Args:
        where: the field of another struct that holds this one; errors name it.

    Raises:
        BadRequest: a value does not fit; ``param`` names the field.
    """
    for name, kind, default in _fields(type(struct)):
        value = getattr(struct, name)
        if value is default or type(value) is kind:
            continue
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            path = f"{where}.{name}" if where else name
            raise BadRequest(f"{path}: {error}", param=path) from None
        if converted is not value:
            msgspec.structs.force_setattr(struct, name, converted)


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
    """Check the address of a ZMQ socket, whose next port is used, too.

    Raises:
        BadRequest: it is none, or has no next port; ``param`` is ``name``.
    """
    found = _TCP_ENDPOINT.fullmatch(value)
    if found is None or not 0 < int(found[1]) < 65535:
        raise BadRequest(
            f"{name} must be tcp://HOST:PORT or tcp://*:PORT, with a port from 1 to 65534, not "
            f"{value!r}",
            param=name,
        )
