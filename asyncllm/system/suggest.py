"""The nearest known name, for errors about unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Comparing longer ones takes time, and none is as long.
_LONGEST_PATH: Final = 80
#: Of a misspelt path: one or two letters of a word.
_SAME_PATH: Final = 0.9


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` with the known name nearest to ``name``, or "" if none is near."""
    from difflib import get_close_matches

    by_spelling = {_plain(other): other for other in known}
    near = get_close_matches(_plain(name), by_spelling, n=1)
    return f"; did you mean {by_spelling[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    # Case and separators do not matter; leading dashes would make short names similar.
    return name.lower().lstrip("-").replace("_", "-")


def suggest_path(path: str, known: Iterable[str]) -> str:
    """``did_you_mean`` for the path of a URL that lacks a known path's beginning, or has too much.

    Clients put a path after a base URL, which may lack "/v1", have it twice, or be a whole route.
    """
    from difflib import get_close_matches

    if len(path) > _LONGEST_PATH:
        return ""
    known = [one for one in known if len(one) > 1]
    inside = [one for one in known if path.endswith(one) or path.startswith(f"{one}/")]
    around = [one for one in known if len(path) > 1 and one.endswith(path)]
    if inside:
        near = [max(inside, key=len)]
    elif around:
        near = [min(around, key=len)]
    else:
        near = get_close_matches(path, known, n=1, cutoff=_SAME_PATH)
    return f"; did you mean {near[0]}?" if near else ""
