"""Frames of server-sent events: OpenAI's, and those with a name, as Responses and Messages have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One SSE frame."""
    return b"data: %b\n\n" % encode(body)


def error_frame(error: Exception) -> bytes:
    """An error body as a frame."""
    return event(error_body(error))


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
