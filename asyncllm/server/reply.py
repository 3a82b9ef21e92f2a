"""What the answers of OpenAI's two routes have in common: the head, the usage, the framing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.server.middleware import request_id
from asyncllm.server.protocol import OpenAIFields, StreamOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.types import TokenDelta

encode = msgspec.json.Encoder().encode


def event(body: dict[str, Any]) -> bytes:
    """One SSE frame."""
    return b"data: %b\n\n" % encode(body)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class OpenAIReply:
    """Builds the answer to one request and counts its tokens.

    Nearly every frame carries text and nothing else: those are three constant pieces of bytes
    around the encoded text. All others are built from dicts.

    Attributes:
        prompts, n: choice ``i * n + j`` is the j-th answer to prompt i.
        with_ids: whether token ids are part of the answer.
        plain: whether frames carry text only.
    """

    def __init__(
        self,
        asked: OpenAIFields,
        *,
        model: str,
        prompts: Sequence[Sequence[int]],
        id_prefix: str,
        kind: str,
        frame_kind: str,
        text_field: bytes,
        text_tail: bytes,
    ):
        """``text_field`` stands between a choice's index and its text, ``text_tail`` after it."""
        options = asked.stream_options or StreamOptions()
        self.prompts = prompts
        self.n = asked.n or 1
        self.with_ids = bool(asked.return_token_ids)
        self._usage_at_end = bool(options.include_usage)
        self._usage_in_frames = bool(options.continuous_usage_stats)
        self.plain = not (self.with_ids or self._usage_in_frames)
        self._prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = 0
        self._head = {
            "id": f"{id_prefix}-{request_id.get()}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._frame_head = {**self._head, "object": frame_kind}
        head = encode(self._frame_head)[:-1]
        self._text_heads = [
            b'data: %b,"choices":[{"index":%d,%b' % (head, index, text_field)
            for index in range(len(prompts) * self.n)
        ]
        self._text_tail = text_tail + b"}]}\n\n"

    def count(self, delta: TokenDelta) -> None:
        """Add a delta to the usage."""
        self._completion_tokens += len(delta.token_ids)

    def text_frame(self, index: int, text: str) -> bytes:
        """The frame of a ``plain`` request that adds text to one choice."""
        return b"".join((self._text_heads[index], encode(text), self._text_tail))

    def frame(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Any other frame with one choice."""
        body = {**self._frame_head, "choices": [choice], **more}
        if self._usage_in_frames:
            body["usage"] = self._usage()
        return event(body)

    def closing(self) -> bytes:
        if not self._usage_at_end:
            return b""
        return event({**self._frame_head, "choices": [], "usage": self._usage()})

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """The answer of a request that does not stream."""
        return encode({**self._head, "choices": choices, "usage": self._usage(), **more})

    def _usage(self) -> dict[str, int]:
        return usage(self._prompt_tokens, self._completion_tokens)
