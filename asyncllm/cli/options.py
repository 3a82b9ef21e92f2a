"""Command-line options generated from the fields of a msgspec Struct, and Structs made from them.

Only given options reach the Struct, so its own defaults and checks are the only ones.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import (
    Any,
    Final,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from asyncllm.cli.config_file import add_config_file
from asyncllm.cli.vllm_options import KeepJson, add_vllm_options
from asyncllm.config import EngineConfig
from asyncllm.config.option_fields import GROUPS
from asyncllm.config.option_names import name_options, option_of
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.types import SamplingParams
from asyncllm.types.validate import type_of
from asyncllm.vllm_options.table import SAME_SHORT
from asyncllm.vllm_options.values import WORDS, own_word, whole_number

S = TypeVar("S", bound=msgspec.Struct)

log = logging.getLogger(__name__)

#: What ``ArgumentParser.add_subparsers()`` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: Engine defaults for batches: they end sooner when the longest answers start first, and nobody
#: watches the tokens arrive.
BATCH_DEFAULTS: Final = {"policy": "longest", "itl_target_ms": 0.0}


def add_config_options(
    parser: argparse.ArgumentParser,
    *structs: type[msgspec.Struct],
    defaults: Mapping[str, Any] | None = None,
    skip: Collection[str] = ("model",),
) -> None:
    """Add an option for each field of the structs, in their groups, and ``--config``.

    Args:
        defaults: the command's own defaults, instead of those of the structs.
        skip: fields without an option; ``add_model`` adds the model's.
    """
    add_config_file(parser)
    parser.set_defaults(defaults=defaults or {})
    fields = [field for struct in structs for field in _fields(struct) if field.name not in skip]
    for title in GROUPS:
        _add_group(parser, title, [f for f in fields if f.group == title], defaults or {})
    if EngineConfig in structs:
        add_vllm_options(parser, listed=ServerConfig in structs)


def add_options(
    parser: argparse.ArgumentParser,
    struct: type[msgspec.Struct],
    names: Collection[str],
    title: str,
) -> None:
    """Add options for some fields of a struct, in a group with this title."""
    _add_group(parser, title, [field for field in _fields(struct) if field.name in names], {})


def add_model(
    parser: argparse.ArgumentParser,
    *,
    text: str = "folder or hub id; the built-in demo model by default",
) -> None:
    """Add the argument that names the model: MODEL, first of the arguments, or ``--model``."""
    model: Any = {"default": argparse.SUPPRESS, "action": _ModelAction, "metavar": "MODEL"}
    parser.add_argument("model", nargs="?", help=text, **model)
    parser.add_argument("--model", dest="model", help="another way to name MODEL", **model)


class _ModelAction(argparse.Action):
    """Takes the model from either place, and refuses two that differ."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        if getattr(args, "model", value) != value:
            parser.error(f"the model is named twice, as {args.model!r} and as {value!r}")
        args.model = value


def add_option(
    group: argparse._ActionsContainer, name: str, kind: Any, text: str, metavar: str | None = None
) -> None:
    """Add the option for one field: ``max_num_seqs`` of type int is ``--max-num-seqs INT``.

    A ``Literal`` becomes choices, a ``bool`` the pair ``--x / --no-x``, a ``tuple`` a repeatable
    option. Options that are not given are absent from the parsed arguments.
    """
    group.add_argument(
        option_of(name),
        *([SAME_SHORT[name]] if name in SAME_SHORT else ()),
        dest=name,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        **_argument(name, type_of(kind)[0]) | ({} if metavar is None else {"metavar": metavar}),
    )


def given_options(args: argparse.Namespace, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of ``struct`` that were given, on the command line or in the file of --config."""
    given = {name: getattr(args, name) for name in struct.__struct_fields__ if name in args}
    kinds = {field.name: field.kind for field in _fields(struct)}
    return {name: _for_field(kinds[name], value) for name, value in given.items()}


def config_from_args(args: argparse.Namespace, struct: type[S]) -> S:
    """A ``struct`` with the given options; for the others the command's defaults, then its own.

    A value out of range is a usage error: the program ends with a message and status 2. What
    options of vLLM's do not change is logged.
    """
    defaults = vars(args).get("defaults", {})
    values = {k: v for k, v in defaults.items() if k in struct.__struct_fields__}
    if struct is EngineConfig:
        for note in vars(args).pop("notes", ()):
            log.warning(note)
    try:
        return struct(**values | given_options(args, struct))
    except BadRequest as error:
        file = vars(args).get("from_file", {}).get(error.param)
        where = "" if file is None else f"{file}: "
        usage_error(args, where + name_options(error.message, error.param))


def refuse_engine_options(args: argparse.Namespace) -> None:
    """Exit with a usage error if engine options are given, which the server at --url decides."""
    given = given_options(args, EngineConfig).keys() - {"model"}
    if given:
        names = ", ".join(map(option_of, sorted(given)))
        usage_error(args, f"{names}: the server at --url decides")


def usage_error(args: argparse.Namespace, message: str) -> NoReturn:
    """Print what is wrong with the command line and exit with status 2."""
    parser: argparse.ArgumentParser = args.parser
    parser.error(message)


class _Field(msgspec.Struct, frozen=True):
    """A field of a struct; ``kind`` is its type, ``text`` its description."""

    name: str
    kind: Any
    default: Any
    text: str = ""
    group: str = GROUPS[0]
    metavar: str | None = None


@cache
def _fields(struct: type[msgspec.Struct]) -> tuple[_Field, ...]:
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for field in msgspec.structs.fields(struct):
        kind, extras = type_of(hints[field.name])
        [meta] = [e for e in extras if isinstance(e, Meta) and e.description] or [Meta()]
        text = meta.description or ""
        found.append(_Field(field.name, kind, field.default, text, **(meta.extra or {})))
    return tuple(found)


def _add_group(
    parser: argparse.ArgumentParser, title: str, fields: list[_Field], defaults: Mapping[str, Any]
) -> None:
    if not fields:
        return
    group = parser.add_argument_group(title)
    for field in fields:
        text = field.text + _default_note(defaults.get(field.name, field.default))
        add_option(group, field.name, field.kind, text, field.metavar)


def _argument(name: str, kind: Any) -> dict[str, Any]:
    """The arguments of ``add_argument`` for a field of a type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        words = {"type": partial(own_word, name)} if name in WORDS else {}
        return {"choices": get_args(kind), **words}
    if get_origin(kind) is tuple:
        return {"action": "append", **_argument(name, get_args(kind)[0])}
    if get_origin(kind) is dict:
        return {"action": KeepJson, "metavar": "JSON"}
    read = partial(_read, name, kind) if name in WORDS or kind is int else kind
    return {"type": read, "metavar": "TEXT" if kind is str else kind.__name__.upper()}


def _read(name: str, kind: type, text: str) -> Any:
    """The value of an option: text or a number, or one of vLLM's words."""
    value = own_word(name, text)
    if kind is not int or not isinstance(value, str):
        return value
    try:
        return whole_number(value)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _for_field(kind: Any, value: Any) -> Any:
    """A value for a field of this type; a file may have a single value for a tuple."""
    if get_origin(kind) is not tuple:
        return value
    return tuple(value) if isinstance(value, list) else (value,)


def _default_note(default: Any) -> str:
    # Descriptions say themselves what None and () stand for.
    if default in (None, ()):
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f" (default: {shown})"


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options for the fields of SamplingParams that have a description."""
    group = parser.add_argument_group("sampling, as the model recommends by default")
    for field in _fields(SamplingParams):
        if field.text:
            add_option(group, field.name, field.kind, field.text)


def check_sampling_options(args: argparse.Namespace) -> None:
    """Leave with a usage error if a value is out of range, before a model is loaded."""
    config_from_args(args, SamplingParams)


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams | None:
    """The options that were given, over ``defaults``; None if none was given."""
    given = given_options(args, SamplingParams)
    return msgspec.structs.replace(defaults, **given) if given else None
