"""An argparse parser with short help, and errors of one line that suggest the nearest name."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from asyncllm.errors import BadRequest
from asyncllm.system.suggest import did_you_mean
from asyncllm.types.params import SamplingParams

#: Where descriptions begin in ``--help``: most options fit to the left of them.
_HELP_COLUMN: Final = 30


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Usage without the optional options, which are listed below it anyway."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, **{"max_help_position": _HELP_COLUMN, **options})

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *others: Any, **named: Any
    ) -> None:
        if usage is None:
            words = filter(None, map(_usage_of, actions))
            usage = " ".join(("%(prog)s", *words, "[OPTION ...]"))
        super().add_usage(usage, actions, *others, **named)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Lines that begin with a space are examples, and are not wrapped.
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width)
            for line in text.splitlines()
        )


class UsageError(Exception):
    """What is wrong with a command line that was parsed quietly."""


class CommandParser(argparse.ArgumentParser):
    """A parser for ``asyncllm``, and for each of its commands.

    Options and positional arguments may come in any order. ``--config FILE`` supplies options that
    the command line leaves out.
    """

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})
        self._intermixing = False
        self._is_quiet = False

    def add_subparsers(self, **options: Any) -> Any:
        # argparse would take the usage line for the program's name.
        return super().add_subparsers(**{"prog": self.prog, **options})

    def parse_quietly(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line again, of which a file may have changed.

        Raises:
            UsageError: it is wrong; nothing is printed.
        """
        self._is_quiet = True
        return self.parse_args(words)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line; an empty one prints the help of a parser with sub-commands."""
        if self._intermixing:  # called by parse_known_intermixed_args below
            return super().parse_known_args(args, namespace)
        words = list(sys.argv[1:] if args is None else args)
        if takes_vllm_options := self.get_default("vllm") is not None:
            from asyncllm.cli.vllm_options import apply_vllm_options, plain_words

            words = plain_words(self._option_string_actions, words)
        self._check_options(words)
        if self._subparsers is not None:
            if not words:
                self.print_help()
                self.exit()
            return super().parse_known_args(words, namespace)
        self._intermixing = True
        try:
            parsed, extra = self.parse_known_intermixed_args(words, namespace)
        finally:
            self._intermixing = False
        if extra:
            self.error(f"unexpected argument {extra[0]!r}")
        parsed.words = words
        if takes_vllm_options:
            apply_vllm_options(self, parsed)
        if getattr(parsed, "config", None) is not None:
            from asyncllm.cli.config_file import apply_file

            apply_file(self, parsed, parsed.config)
        if self._is_quiet:
            parsed.notes = []
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, without the usage, which would hide the message."""
        if self._is_quiet:
            raise UsageError(message)
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _check_options(self, words: Iterable[str]) -> None:
        """Refuse unknown options first: after a typo argparse complains about something else."""
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            if not word.startswith("-") or word == "-" or " " in word or name in known:
                continue
            if self._negative_number_matcher.match(word) or (word[1] != "-" and word[:2] in known):
                continue
            options = [option for option in known if option.startswith("--")]
            self.error(f"unknown option {name}{did_you_mean(name, options)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action,
                f"{value!r} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}",
            )


def _usage_of(action: argparse.Action) -> str | None:
    """An argument as usage shows it; None for an optional option."""
    name = str(action.metavar or action.dest.upper())
    if action.option_strings:
        return f"{action.option_strings[0]} {name}" if action.required else None
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)


#: Numbers of tokens or turns, which a load draws from.
_SPAN: Final = re.compile(r"([1-9]\d{0,6})(?:-([1-9]\d{0,6}))?")

T = TypeVar("T", int, float, str)
N = TypeVar("N", int, float)


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values with commas between them."""
    return lambda text: [kind(item) for item in text.split(",")]


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """One of these, as it is written."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not among {', '.join(choices)}")
        return text

    return parse


def positive(kind: Callable[[str], N]) -> Callable[[str], N]:
    """A finite number above 0."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    return parse


def temperature(text: str) -> float:
    """A temperature that requests may have."""
    try:
        return SamplingParams(temperature=float(text)).temperature
    except (ValueError, BadRequest) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def span(text: str) -> tuple[int, int]:
    """The least and the most of what is written as 200 or 100-400."""
    found = _SPAN.fullmatch(text)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor a range such as 100-400")
    return int(found[1]), int(found[2] or found[1])
