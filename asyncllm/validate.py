"""Type checks for what users pass by hand; msgspec itself only checks what it decodes."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from asyncllm.errors import BadRequest

T = TypeVar("T")


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, Any], ...]:
    fields = msgspec.structs.fields(kind)
    return tuple((field.encode_name, field.type, field.default) for field in fields)


def check_types(struct: msgspec.Struct, where: str = "") -> None:
    """Hold every field against its annotation, bounds in ``Meta`` included.

    What msgspec can convert (a list for a tuple, a Decimal for a float) it does, in place. Defaults
    must fit: most values are, and each look takes microseconds.

    Args:
        where: the field that holds the struct, if it is part of another one; errors name it.

    Raises:
        BadRequest: one does not fit; ``param`` names it.
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
    """An argument that is of the type that its parameter takes, or None.

    Raises:
        BadRequest: it is neither; the message has the parameter, the expected and the given type.
    """
    if value is None or isinstance(value, kind):
        return value
    hint = f"; use {kind.__name__}(**{name})" if isinstance(value, dict) else ""
    raise BadRequest(
        f"{name} must be {kind.__name__}, not {type(value).__name__}{hint}", param=name
    )
