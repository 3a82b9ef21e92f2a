"""Types of option values, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", int, float, str)
N = TypeVar("N", int, float)


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values with commas between them."""
    return lambda text: [kind(item) for item in text.split(",")]


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
