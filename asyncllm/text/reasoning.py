"""Where the reasoning at the beginning of an output is, by its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.types import Reasoning


class ReasoningSpan:
    """Follows one output.

    Attributes:
        inside: whether the next token is part of the reasoning, as far as is known before it.
        at_start: nothing has come yet, so reasoning may begin.
    """

    __slots__ = ("_ends", "_starts", "at_start", "inside")

    def __init__(self, asked: Reasoning):
        self.inside = asked.is_open
        self.at_start = True
        self._starts = frozenset(() if asked.is_open else asked.start_ids)
        self._ends = frozenset(asked.end_ids)

    def accept(self, token: int) -> bool:
        """Take the next token; whether it is part of the reasoning, as its markers are."""
        if self.at_start:
            self.at_start = False
            self.inside |= token in self._starts
        part = self.inside
        self.inside = part and token not in self._ends
        return part
