"""The nearest known name, for errors about unknown names."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` with the known name nearest to ``name``, or "" if none is near."""
    from difflib import get_close_matches

    by_spelling = {_plain(other): other for other in known}
    near = get_close_matches(_plain(name), by_spelling, n=1)
    return f"; did you mean {by_spelling[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    # Case and separators do not matter; leading dashes would make short names similar.
    return name.lower().lstrip("-").replace("_", "-")
