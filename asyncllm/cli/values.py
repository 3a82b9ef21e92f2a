"""Types of option values, for argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Final, TypeVar

from asyncllm.errors import BadRequest
from asyncllm.types.params import SamplingParams

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
