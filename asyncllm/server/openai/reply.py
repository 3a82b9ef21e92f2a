"""What the answers of OpenAI's two routes have in common: the head, the usage, the framing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from asyncllm.server.chat.requests import OpenAIFields, StreamOptions
from asyncllm.server.http.answer import encode
from asyncllm.server.http.middleware import request_id
from asyncllm.server.streaming.frames import DONE, EVENT_STREAM, error_frame, event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncllm.types import TokenDelta


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object; ``cached_tokens`` of the prompts did not have to be computed."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(cached_tokens, prompt_tokens)},
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

    content_type = EVENT_STREAM
    explain: Callable[[], dict[str, Any]] | None = None

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
        self._best_of = self.n if asked.use_beam_search else asked.best_of or self.n
        self.with_ids = bool(asked.return_token_ids)
        self._usage_at_end = bool(options.include_usage)
        self._usage_in_frames = bool(options.continuous_usage_stats)
        self.plain = not (self.with_ids or self._usage_in_frames)
        self._prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.id = f"{id_prefix}-{request_id.get()}"
        self._head = {
            "id": self.id,
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
        no_usage = b',"usage":null' if self._usage_at_end else b""
        self._text_tail = text_tail + b"}]" + no_usage + b"}\n\n"

    def count(self, index: int, delta: TokenDelta) -> None:
        """Add a delta of one choice to the usage.

        Each prompt counts once, and so does what was cached of it when its first choice came: the
        others find it cached because of that one.
        """
        self._completion_tokens += len(delta.token_ids)
        if index % self.n == 0:
            self._cached_tokens += delta.cached_tokens

    def best(self, outputs: list[TokenDelta]) -> list[TokenDelta]:
        """What to answer with, of all that was generated for a request that does not stream.

        That is, for each prompt, the ``n`` with the highest mean logprob, the best one first. The
        tokens of the others count in the usage.
        """
        if self._best_of == self.n:
            return outputs
        chosen = []
        for start in range(0, len(outputs), self._best_of):
            group = outputs[start : start + self._best_of]
            ranked = sorted(group, key=_mean_logprob, reverse=True)
            self._completion_tokens += sum(len(other.token_ids) for other in ranked[self.n :])
            # The first to be generated knows of the prompt.
            ranked[0].cached_tokens = group[0].cached_tokens
            ranked[0].prompt_logprobs = group[0].prompt_logprobs
            chosen += ranked[: self.n]
        return chosen

    def text_frame(self, index: int, text: str) -> bytes:
        """The frame of a ``plain`` request that adds text to one choice."""
        return b"".join((self._text_heads[index], encode(text), self._text_tail))

    def frame(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Any other frame with one choice."""
        body = {**self._frame_head, "choices": [choice], **more}
        if self._usage_in_frames:
            body["usage"] = self._usage()
        elif self._usage_at_end:
            body["usage"] = None
        return event(body)

    def closing(self) -> bytes:
        ends: list[dict[str, Any]] = []
        if self._usage_at_end:
            ends.append({"usage": self._usage()})
        if self.explain is not None:
            ends.append({"trace": self.explain()})
        return b"".join([event({**self._frame_head, "choices": [], **end}) for end in ends]) + DONE

    def failure(self, error: Exception) -> bytes:
        return error_frame(error) + DONE

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """The answer of a request that does not stream."""
        if self.explain is not None:
            more["trace"] = self.explain()
        return encode({**self._head, "choices": choices, "usage": self._usage(), **more})

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


def _mean_logprob(output: TokenDelta) -> float:
    entries = output.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else 0.0
