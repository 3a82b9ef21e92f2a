"""Fields that clients send and nobody here knows: misspelt, or of another server."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Of what is reported, so that no client decides how long a header gets.
MAX_NAMES: Final = 16
_MAX_NAME: Final = 64

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def unknown_fields(
    given: Mapping[str, Any], struct: msgspec.Struct, where: str = ""
) -> Iterator[str]:
    """Paths of what is in ``given`` and not in the Struct that was made from it, in their order.

    Structs inside are looked into, also those in lists. Free-form objects, like the messages that
    are handed to the chat template as they are, have no unknown fields.
    """
    names = _names(type(struct))
    if not given.keys() <= names:
        yield from (where + name for name in given if name not in names)
    for attribute, name in _nesting(type(struct)):
        if name in given:
            yield from _inside(given[name], getattr(struct, attribute), where + name)


def _inside(given: Any, value: Any, where: str) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from unknown_fields(given, value, where + ".")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _inside(given[i], item, f"{where}[{i}]")


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    tag = kind.__struct_config__.tag_field
    return frozenset((*kind.__struct_encode_fields__, *([tag] if tag else [])))


@cache
def _nesting(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The fields that may hold Structs: name of the attribute, name in JSON."""
    fields = msgspec.structs.fields(kind)
    return tuple((f.name, f.encode_name) for f in fields if may_hold_struct(f.type))


def may_hold_struct(hint: Any) -> bool:
    """Whether values of a type may be Structs, or have some inside."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return True
    return any(may_hold_struct(inner) for inner in get_args(hint))


def ignored_header(names: Iterable[str]) -> str:
    """The names as the value of a header: bounded, and of harmless characters only."""
    first = list(islice(names, MAX_NAMES + 1))
    shown = [_UNSAFE.sub("?", name[:_MAX_NAME]) for name in first[:MAX_NAMES]]
    return ", ".join(shown + ["..."] * (len(first) > MAX_NAMES))


#: Field -> the values, besides null, that ask for nothing and may pass.
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


def refuse_unsupported(asked: object, fields: Mapping[str, Any]) -> None:
    """
    Args:
        asked: the request.
        fields: what else was sent.

    Raises:
        BadRequest: it uses a field of the table, in a way that asks for something.
    """
    for name, harmless in UNSUPPORTED.items():
        value = getattr(asked, name, None) or fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)


def unsupported(name: str) -> BadRequest:
    return BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
