"""Server-sent events that have a name, as OpenAI's Responses and Anthropic's Messages send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.server.streaming.reply import encode

if TYPE_CHECKING:
    from collections.abc import Mapping


def named_event(body: Mapping[str, Any]) -> bytes:
    """One event; its name is the ``type`` that its body has too."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), encode(body))


class TextEvents:
    """Events that are alike but for their text: nearly all of a stream."""

    def __init__(self, body: Mapping[str, Any]):
        """``body`` is that of each, with an empty string last, in the object that is last or in it
        itself: there the text goes."""
        head = encode(body)
        place = head.rindex(b'""')
        self._head = b"event: %b\ndata: %b" % (body["type"].encode(), head[:place])
        self._tail = head[place + 2 : -1]

    def write(self, text: str, more: bytes = b"") -> bytes:
        """The event with this text; ``more`` are further fields, each with a comma before it."""
        return b"".join((self._head, encode(text), self._tail, more, b"}\n\n"))
