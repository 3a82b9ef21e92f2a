"""Frames of server-sent events: OpenAI's, and those with a name, as Responses and Messages have."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"


def event(body: msgspec.Struct | dict[str, Any]) -> bytes:
    """One SSE frame."""
    return b"data: %b\n\n" % encode(body)


def error_frame(error: Exception) -> bytes:
    """An error body as a frame."""
    return event(error_body(error))


def named_event(body: msgspec.Struct) -> bytes:
    """One event; its name is the tag of its Struct, the ``type`` of the body."""
    tag = body.__struct_config__.tag
    assert isinstance(tag, str)
    return b"event: %b\ndata: %b\n\n" % (tag.encode(), encode(body))
