"""The logprobs of the tokens that make up an answer's content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.text.chat_reader import TokenPlaces
from asyncllm.text.parsing import Content, Event
from asyncllm.types import TokenDelta, TokenLogprob


class ContentLogprobs:
    """Assigns each token's logprobs to the first content that has some of its text.

    Tokens of only reasoning, calls or markup are left out, and so is the end token. The result does
    not depend on how the tokens are cut into deltas.
    """

    def __init__(self, reader: MessageReader, places: TokenPlaces):
        reader.record_places()
        self._reader = reader
        self._places = places
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()

    def of(self, delta: TokenDelta, events: list[Event]) -> list[list[TokenLogprob]]:
        """For each event that was just read from the delta; none for events other than content."""
        for entry in delta.logprobs or ():
            self._waiting.append((*self._places.next(entry.token_id), entry))
        pieces = iter(self._reader.take_places(events))
        return [
            self._under(pieces, len(event.text)) if isinstance(event, Content) else []
            for event in events
        ]

    def _under(self, pieces: Iterator[tuple[int, int]], length: int) -> list[TokenLogprob]:
        """The logprobs of the tokens in the next pieces with this total length."""
        found: list[TokenLogprob] = []
        while length > 0:
            begin, end = next(pieces)
            length -= end - begin
            while self._waiting and self._waiting[0][0] < end:
                _, token_end, entry = self._waiting.popleft()
                if token_end > begin:
                    found.append(entry)
        return found
