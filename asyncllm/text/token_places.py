"""The places of tokens in their text."""

from __future__ import annotations

from collections.abc import Collection

from asyncllm.text.detokenizer import Detokenizer


class TokenPlaces:
    """Follows the tokens of one sequence.

    A stop string may end the real text, or hold back its end; places are those in the whole text.

    Args:
        detokenizer: like the sequence's own, for this object alone.
        hidden: tokens that are left out of the text.
    """

    def __init__(self, detokenizer: Detokenizer, hidden: Collection[int]):
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._length = 0

    def next(self, token_id: int) -> tuple[int, int]:
        """Start and end, in characters, of the next token.

        A part of a character has the place of the character; a hidden token has an empty place.
        """
        start = self._length
        self._length += len(self._detokenizer.push(token_id))
        if token_id in self._hidden:
            return start, start
        return start, max(self._length, start + 1)
