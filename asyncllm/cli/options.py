"""Command-line options generated from the fields of a msgspec Struct, and the way back.

Only options that were given reach the Struct, so its own defaults and checks stay the only ones.
"""

from __future__ import annotations

import argparse
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Collection

S = TypeVar("S", bound=msgspec.Struct)

#: What ``ArgumentParser.add_subparsers()`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_options(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct],
    *,
    title: str,
    skip: Collection[str] = (),
) -> None:
    """Add an option for each field of ``struct`` that is not in ``skip``, in a group of their own.

    A field's ``Meta`` description becomes the help text.
    """
    group = parser.add_argument_group(title)
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        if field.name not in skip:
            kind, description = _split_annotated(hints[field.name])
            add_option(group, field.name, kind, description + _default_note(field.default))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the model, ``EngineConfig.model``."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        help="folder or hub id; the built-in demo when none is named",
    )


def add_option(group: argparse._ActionsContainer, name: str, kind: Any, text: str) -> None:
    """Add the option for one field: ``max_num_seqs`` of type int is ``--max-num-seqs INT``.

    A ``Literal`` becomes choices, a ``bool`` a pair ``--x / --no-x``, a ``tuple`` an option that
    may be repeated. An option that is not given leaves no trace in the parsed arguments.
    """
    group.add_argument(
        "--" + name.replace("_", "-"),
        dest=name,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        **_argument(_without_none(kind)),
    )


def given_options(args: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of ``struct`` that were given on the command line."""
    given = {name: getattr(args, name) for name in struct.__struct_fields__ if name in args}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}


def config_from_args(args: argparse.Namespace, struct: type[S]) -> S:
    """A ``struct`` with the options that were given and its own defaults otherwise.

    A value out of range is a usage error: it ends the program with a message and status 2.
    """
    try:
        return struct(**given_options(args, struct))
    except BadRequest as error:
        usage_error(args, error.message)


def usage_error(args: argparse.Namespace, message: str) -> NoReturn:
    """Say what is wrong with the command line and leave with status 2."""
    parser: argparse.ArgumentParser = args.parser
    parser.error(message)


def _split_annotated(hint: Any) -> tuple[Any, str]:
    """The bare type and its ``Meta`` description."""
    if get_origin(hint) is not Annotated:
        return hint, ""
    kind, *extras = get_args(hint)
    [text] = (meta.description or "" for meta in extras if isinstance(meta, Meta))
    return kind, text


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        [kind] = (member for member in get_args(kind) if member is not NoneType)
    return kind


def _argument(kind: Any) -> dict[str, Any]:
    """What argparse must know about a type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"action": "append", **_argument(get_args(kind)[0])}
    return {"type": kind, "metavar": "TEXT" if kind is str else kind.__name__.upper()}


def _default_note(default: Any) -> str:
    # What None and () stand for is in the description itself.
    return "" if default in (None, ()) else f" (default: {default})"
