"""Token ids to text, one token at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Makes the text of one sequence, token by token.

    The results of ``push`` and ``finish``, joined, are the text of the tokens. A character is never
    split; one that is incomplete at the end is left out.
    """

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that has become certain, maybe ""."""
        ...

    def finish(self) -> str:
        """Return the text held back. Nothing may be pushed afterwards."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are plain byte strings."""

    __slots__ = ("_bytes_of", "_incomplete", "_strip_first_space")

    def __init__(self, bytes_of: Mapping[int, bytes], *, strip_first_space: bool):
        self._bytes_of = bytes_of
        self._strip_first_space = strip_first_space
        self._incomplete = b""

    def push(self, token_id: int) -> str:
        # Like codecs.getincrementaldecoder("utf-8"), without its Python layer.
        data = self._incomplete + self._bytes_of[token_id]
        text, used = utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        if self._strip_first_space and text:
            self._strip_first_space = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return ""  # only an incomplete character can be left


class WindowDetokenizer:
    """For any other decoder: decodes a short window of tokens and returns the new text.

    Exact for every decoder that only appends text, and looks back no further than the tokens of the
    previous delivery.
    """

    # A character has at most 4 bytes, hence 4 tokens: a U+FFFD after that many is in the text.
    _MAX_HELD = 4

    __slots__ = ("_context", "_decode", "_delivered", "_visible", "_window")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        visible: Callable[[int], bool],
        context: list[int],
    ):
        self._decode = decode
        self._visible = visible
        self._window = context  # tokens delivered last, then the tokens held back
        self._context = len(context)  # how many of them are delivered
        self._delivered = len(decode(context))  # characters of text these stand for

    def push(self, token_id: int) -> str:
        if not self._visible(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._context
        if text.endswith("\N{REPLACEMENT CHARACTER}") and held < self._MAX_HELD:
            return ""
        new = text[self._delivered :]
        if new:
            del self._window[: self._context]
            self._context = len(self._window)
            self._delivered = len(self._decode(self._window))
        return new

    def finish(self) -> str:
        text = self._decode(self._window).rstrip("\N{REPLACEMENT CHARACTER}")
        return text[self._delivered :]
