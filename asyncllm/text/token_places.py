"""Where in a text its tokens are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncllm.text.detokenizer import Detokenizer


class TokenPlaces:
    """Follows the tokens of one sequence.

    Text that a stop string ends or holds back is the beginning of what these tokens make.

    Args:
        detokenizer: as the sequence's own; nobody else pushes to it.
        hidden: tokens that are left out of the text.
    """

    def __init__(self, detokenizer: Detokenizer, hidden: Collection[int]):
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._length = 0

    def next(self, token_id: int) -> tuple[int, int]:
        """Start and end, in characters, of what the next token adds.

        One that is a part of a character is where the character is; a hidden one is nowhere.
        """
        start = self._length
        self._length += len(self._detokenizer.push(token_id))
        if token_id in self._hidden:
            return start, start
        return start, max(self._length, start + 1)
