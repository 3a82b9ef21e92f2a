"""Kinds of values that options of a command line may have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Some of a kind, with commas between them."""

    def parse(text: str) -> list[T]:
        return [kind(item) for item in text.split(",")]

    return parse


def positive(kind: Callable[[str], T]) -> Callable[[str], T]:
    """A number above 0."""

    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not 0 < value < float("inf"):  # type: ignore[operator]
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    return parse
