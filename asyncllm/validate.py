"""Type checks for structs that users build by hand; msgspec itself only checks what it decodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from asyncllm.errors import BadRequest


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.encode_name, field.type) for field in msgspec.structs.fields(kind))


def check_types(struct: msgspec.Struct) -> None:
    """Hold every field against its annotation, bounds in ``Meta`` included.

    What msgspec can convert (a list for a tuple, a Decimal for a float) it does, in place.

    Raises:
        BadRequest: one does not fit; ``param`` names it.
    """
    for name, kind in _fields(type(struct)):
        value = getattr(struct, name)
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{name}: {error}", param=name) from None
        if converted is not value:
            msgspec.structs.force_setattr(struct, name, converted)
