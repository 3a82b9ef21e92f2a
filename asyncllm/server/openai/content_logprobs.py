"""Which of an answer's tokens its content is made of, and their logprobs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asyncllm.text.parsing import Content

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.server.chat.message_reader import Turn
    from asyncllm.text.parsing import Event
    from asyncllm.text.token_places import TokenPlaces
    from asyncllm.types import TokenDelta, TokenLogprob


class ContentLogprobs:
    """Hands out each token's logprobs with the first content that has some of its text.

    Tokens that are nothing but reasoning, calls, or markup are left out, and so is the end token.
    However the tokens are cut into deltas, every text gets the same in the end.
    """

    def __init__(self, turn: Turn, places: TokenPlaces):
        turn.record_places()
        self._turn = turn
        self._places = places
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()

    def of(self, delta: TokenDelta, events: list[Event]) -> list[list[TokenLogprob]]:
        """For each event that the turn has just read from the delta; nothing for other events."""
        for entry in delta.logprobs or ():
            self._waiting.append((*self._places.next(entry.token_id), entry))
        pieces = iter(self._turn.take_places(events))
        return [
            self._under(pieces, len(event.text)) if isinstance(event, Content) else []
            for event in events
        ]

    def _under(self, pieces: Iterator[tuple[int, int]], length: int) -> list[TokenLogprob]:
        """The logprobs of the tokens of the next pieces, which together have this length."""
        found: list[TokenLogprob] = []
        while length > 0:
            begin, end = next(pieces)
            length -= end - begin
            while self._waiting and self._waiting[0][0] < end:
                _, token_end, entry = self._waiting.popleft()
                if token_end > begin:
                    found.append(entry)
        return found
