"""Fields of a body that its Struct does not have: unknown ones, and those not supported yet."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
