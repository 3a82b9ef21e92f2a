"""vLLM's options on the command line and in the file of ``--config``, and their table in the help.

As there, options may have underscores (``--max_model_len``), lists several values
(``--served-model-name a b``), and JSON its parts one by one (``--hf-overrides.key value``).
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from asyncllm.config.option_names import option_of
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.vllm_options.table import options, sections
from asyncllm.vllm_options.translate import translate
from asyncllm.vllm_options.values import merged

_TITLE: Final = "options of vLLM"
#: Other names than here stand beside them, all others below what is said about them.
_COLUMN: Final = 34
_INDENTED: Final[dict[str, Any]] = {
    **dict.fromkeys(("initial_indent", "subsequent_indent"), 6 * " "),
    "break_on_hyphens": False,
}
_ELSEWHERE: Final = "They are taken as well; 'asyncllm serve --help' lists them."


def add_vllm_options(parser: argparse.ArgumentParser, *, listed: bool) -> None:
    """Take them.

    Args:
        listed: print their table at the end of the help.
    """
    parser.set_defaults(vllm={})
    group = parser.add_argument_group(_TITLE, _table() if listed else _ELSEWHERE)
    for option in options().values():
        names = [option_of(option.name)]
        if names[0] in parser._option_string_actions:
            continue  # a sampling option
        if option.takes == "nothing":
            names.append(f"--no-{names[0].removeprefix('--')}")
        short = [option.short] if option.short else []
        kind: Any = {"nothing": 0, "one": None, "several": "+"}[option.takes]
        group.add_argument(
            *names,
            *short,
            dest=option.name,
            action=_Keep,
            nargs=kind,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _table() -> str:
    """For ``--help``, which leaves lines alone that begin with a space."""
    lines = []
    for number, (title, rows) in enumerate(sections()):
        lines.append(f"{title}:")
        for names, says in rows:
            if number == 0 and len(names) < _COLUMN:
                lines.append(f"  {names:<{_COLUMN}}{says}")
            else:
                lines += [f"  {says}", textwrap.fill(names, 78, **_INDENTED)]
    return "\n".join(lines)


class _Keep(argparse.Action):
    """Keeps the value by its name in ``args.vllm``, until all are known."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        value: Any,
        option: str | None = None,
    ) -> None:
        if self.nargs == 0:
            value = not str(option).startswith("--no-")
        args.vllm = {**args.vllm, self.dest: merged(args.vllm.get(self.dest), json_of(value))}


class KeepJson(argparse.Action):
    """A JSON object; given again, it has the keys of both."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        if not isinstance(found := json_of(value), dict):
            raise argparse.ArgumentError(self, f"{value!r} is not a JSON object")
        setattr(args, self.dest, merged(vars(args).get(self.dest), found))


def json_of(value: Any) -> Any:
    """The object in a text that is one, else the value."""
    try:
        is_object = isinstance(value, str) and value.lstrip().startswith("{")
        return msgspec.json.decode(value) if is_object else value
    except msgspec.DecodeError:
        return value


def apply_vllm_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set our options to what vLLM's say; ``args.notes`` has a line for each that has no effect.

    What is wrong or not supported is a usage error.
    """
    own = {action.dest for action in parser._actions}
    args.notes = []
    try:
        found = translate(args.vllm, option_of)
    except BadRequest as error:
        parser.error(error.message)
    for field, value in found.fields.items():
        if field not in own:
            parser.error(f"{option_of(field)} is an option of 'asyncllm serve' only")
        old = vars(args).get(field, value)
        if old != value and not isinstance(value, dict):
            parser.error(f"{option_of(field)} is given twice, as {old!r} and as {value!r}")
        setattr(args, field, merged(old, value))
    args.notes = found.notes


def plain_words(actions: Mapping[str, argparse.Action], words: Sequence[str]) -> list[str]:
    """A command line with dashes for underscores, JSON objects in one, and lists value by value."""
    plain: list[str] = []
    rest: Iterator[str] = iter(words)
    has_model = "--model" in (word.partition("=")[0] for word in words)
    has_model |= bool(words) and not words[0].startswith("-")
    last: argparse.Action | None = None
    for word in rest:
        if word == "--":
            return [*plain, word, *rest]
        if not word.startswith("-"):
            # The first value is the option's own; further ones are a list, as MODEL is known.
            is_further = last is not None and plain[-1] != last.option_strings[0]
            plain += [last.option_strings[0], word] if last and is_further else [word]
            continue
        name, equals, value = word.partition("=")
        name, *keys = name.split(".") if name.startswith("--") else [name]
        action = actions.get(name) or actions.get(name.replace("_", "-"))
        if action is None:
            plain.append(word)
        elif keys:
            plain += [action.option_strings[0], _nested(keys, value if equals else next(rest, ""))]
        else:
            plain.append(name.replace("_", "-") + equals + value if name[:2] == "--" else word)
        last = action if has_model and action is not None and _is_list(action) else None
    return plain


def _is_list(action: argparse.Action) -> bool:
    # Where other commands have lists, words behind them may be files.
    is_repeated = isinstance(action, argparse._AppendAction)
    return is_repeated and action.dest in ServerConfig.__struct_fields__


def _nested(keys: Sequence[str], value: str) -> str:
    """JSON in which keys lead to a value, which is JSON itself or text."""
    *outer, key = keys
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError:
        found = value
    nested: Any = {key.removesuffix("+"): value.split(",") if key.endswith("+") else found}
    for name in reversed(outer):
        nested = {name: nested}
    return msgspec.json.encode(nested).decode()
