"""Logprobs as clients get them: chats' objects, completions' parallel lists, those of prompts."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.http.answer import in_slices
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai import schemas
from asyncllm.text.chat_reader import TokenPlaces
from asyncllm.text.parsing import Content, Event
from asyncllm.types import PromptLogprob, TokenDelta, TokenLogprob

#: JSON has no -inf; clients know this number from vLLM.
LOWEST = -9999.0

_encode = msgspec.json.Encoder().encode


def token_text(raw: bytes) -> str:
    """One token as text; bytes that are not whole characters are spelled out, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> Callable[[int], str]:
    """The names of tokens in logprobs: their texts, or ``token_id:N``, which is unambiguous."""
    if as_ids:
        return "token_id:{}".format
    return lambda token_id: token_text(tokenizer.token_bytes(token_id))


def token_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer, *, as_ids: bool = False
) -> Any:  # list[schemas.TokenLogprob], many of them as JSON
    """Generated tokens as chats have them, each with its likeliest alternatives."""
    name = token_names(tokenizer, as_ids=as_ids)

    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def written(entry: TokenLogprob) -> schemas.TokenLogprob:
        return schemas.TokenLogprob(
            **fields(entry.token_id, entry.logprob),
            top_logprobs=[schemas.TopLogprob(**fields(*top)) for top in entry.top],
        )

    return in_slices(entries, written)


def prompt_logprobs(
    entries: Iterable[PromptLogprob | None], tokenizer: Tokenizer, most: int
) -> Any:  # PromptLogprobs, as JSON
    """For each token of a prompt, by token id: its own logprob, and ``most`` likely others.

    In vLLM's format; the first token has none. Encoded entry by entry: as objects, those of a long
    prompt would take a gigabyte.
    """

    def value(token_id: int, logprob: float, rank: int) -> schemas.PromptLogprob:
        text = token_text(tokenizer.token_bytes(token_id))
        return schemas.PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=text)

    def written(entry: PromptLogprob | None) -> bytes:
        if entry is None:
            return b"null"
        # Its own comes first, and is never overwritten.
        values = {str(entry.token_id): value(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:most], 1):
            if token != entry.token_id:
                values[str(token)] = value(token, logprob, rank)
        return _encode(values)

    return msgspec.Raw(b"[%b]" % b",".join(map(written, entries)))


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
        """The logprobs of each event just read from the delta; none for events without content."""
        for entry in delta.logprobs or ():
            self._waiting.append((*self._places.next(entry.token_id), entry))
        pieces = iter(self._reader.take_places(events))
        return [
            self._in_pieces(pieces, len(event.text)) if isinstance(event, Content) else []
            for event in events
        ]

    def _in_pieces(self, pieces: Iterator[tuple[int, int]], length: int) -> list[TokenLogprob]:
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


class LogprobLists:
    """Builds completions' lists for one choice, frame by frame: offsets count from its start."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, hidden: Collection[int] = ()):
        """``hidden`` tokens are left out of the answer's text."""
        self._bytes_of = tokenizer.token_bytes
        self._name = token_names(tokenizer, as_ids=as_ids)
        self._hidden = hidden
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def generated(self, entries: Iterable[TokenLogprob]) -> schemas.CompletionLogprobs:
        lists = _no_lists()
        for entry in entries:
            self._add(lists, entry.token_id, entry, self._hidden, len(entry.top))
        return lists

    def prompt(
        self,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        text: str,
        *,
        hidden: Collection[int],
        most: int,
    ) -> schemas.CompletionLogprobs:
        """The lists of a prompt that is echoed as ``text``; they come before any others.

        Args:
            hidden: tokens that are left out of the text.
            most: of the likeliest tokens.
        """
        lists = _no_lists()
        for token, entry in zip(tokens, entries, strict=True):
            self._add(lists, token, entry, hidden, most)
        # Decoding the encoded text may give a shorter text.
        lists.text_offset = [min(offset, len(text)) for offset in lists.text_offset]
        self._offset = len(text)
        return lists

    def _add(
        self,
        lists: schemas.CompletionLogprobs,
        token: int,
        entry: TokenLogprob | None,
        hidden: Collection[int],
        most: int,
    ) -> None:
        """Add a token. Without an entry, it is a prompt's first one and has no logprob."""
        name, logprob = self._name(token), None if entry is None else _finite(entry.logprob)
        top: dict[str, float] | None = None
        if entry is not None and logprob is not None:
            top = {}
            for other, likely in entry.top[:most]:
                top.setdefault(self._name(other), _finite(likely))  # of equal names, the likelier
            top.setdefault(name, logprob)  # the token itself is always there
        lists.tokens.append(name)
        lists.token_logprobs.append(logprob)
        lists.top_logprobs.append(top)
        lists.text_offset.append(self._offset)
        if token not in hidden:
            self._offset += len(self._decoder.decode(self._bytes_of(token)))


def joined(
    first: schemas.CompletionLogprobs, second: schemas.CompletionLogprobs
) -> schemas.CompletionLogprobs:
    """Completions' lists, one after the other."""
    return schemas.CompletionLogprobs(
        **{name: getattr(first, name) + getattr(second, name) for name in first.__struct_fields__}
    )


def _no_lists() -> schemas.CompletionLogprobs:
    return schemas.CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _finite(logprob: float) -> float:
    # Not max() alone: NaN compares false with everything.
    return logprob if logprob > LOWEST else LOWEST
