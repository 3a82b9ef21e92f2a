"""What the replies of completions and chats share: the head, the usage, the framing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import OpenAIFields, StreamOptions
from asyncllm.server.http.answer import encode, encode_with
from asyncllm.server.http.middleware import request_id
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai import schemas
from asyncllm.server.streaming.frames import DONE, EVENT_STREAM, error_frame, event
from asyncllm.server.trace import Trace
from asyncllm.types import TokenDelta

#: The most prompt logprobs in a stream: about 2 MB, possibly in one write.
MAX_STREAMED: Final = 1 << 15


def check_scoring(body: OpenAIFields, prompts: Sequence[Sequence[int]], most: int | None) -> None:
    """
    Args:
        most: alternatives to each token of the prompts; None if there are no logprobs.

    Raises:
        BadRequest: the logprobs are too many for a stream.
    """
    if most is None or not body.stream:
        return
    count = (body.n or 1) * sum(map(len, prompts)) * (1 + most)
    if count > MAX_STREAMED:
        name = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
        raise BadRequest(
            f"{count} logprobs of prompts are more than the {MAX_STREAMED} that are streamed; ask "
            "for fewer, or without stream",
            param=name,
        )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> schemas.Usage:
    """``cached_tokens`` of the prompts did not have to be computed."""
    cached = min(cached_tokens, prompt_tokens)
    return schemas.Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=cached),
    )


class OpenAIReply(ABC):
    """Builds the answer to one request and counts its tokens.

    Nearly every frame carries text and nothing else: it is encoded once with an empty text, and
    written as the bytes before and after it.

    Attributes:
        prompts, n: choice ``i * n + j`` is the j-th answer to prompt i.
        best_of: how many sequences are generated for each prompt.
        with_ids: whether token ids are part of the answer.
        plain: whether frames carry text only.
    """

    content_type = EVENT_STREAM
    explain: Callable[[], Trace] | None = None
    id_prefix: ClassVar[str]
    answer_type: ClassVar[Any]
    chunk_type: ClassVar[Any]

    def __init__(
        self, body: OpenAIFields, model: str, prompts: Sequence[Sequence[int]], scored: int | None
    ):
        """``scored``: see ``check_scoring``, which this calls."""
        check_scoring(body, prompts, scored)
        options = body.stream_options or StreamOptions()
        self.prompts = prompts
        self.n = body.n or 1
        self.best_of = self.n if body.use_beam_search else body.best_of or self.n
        self.with_ids = bool(body.return_token_ids)
        self._usage_at_end = bool(options.include_usage)
        self._usage_in_frames = bool(options.continuous_usage_stats)
        self.plain = not (self.with_ids or self._usage_in_frames)
        self._prompt_tokens = sum(map(len, prompts))
        self._completion_tokens = 0
        self._cached_tokens = 0
        # Drafted tokens of the request's prediction.
        self.num_right = self.num_wrong = 0
        self.id = f"{self.id_prefix}-{request_id.get()}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}

    def sign(self, fingerprint: str | None) -> None:
        """Have every frame say under which conditions the same request gets the same bits."""
        if fingerprint is not None:
            self._head["system_fingerprint"] = fingerprint

    @abstractmethod
    def text_choice(self, index: int) -> msgspec.Struct:
        """A choice of a frame with an empty text, and no other empty string after it."""

    def prompt_fields(self, body: OpenAIFields, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """The fields of the answer that repeat each prompt, as far as the request wants them."""
        found: list[dict[str, Any]] = [{} for _ in self.prompts]
        for fields, ids in zip(found, self.prompts, strict=True):
            if self.with_ids:
                fields["prompt_token_ids"] = ids
            if body.return_prompt_text:
                fields["prompt_text"] = tokenizer.decode(ids, skip_special_tokens=False)
        return found

    def count(self, index: int, delta: TokenDelta) -> None:
        """Add a delta of one choice to the usage.

        Cached tokens of a prompt count with its first choice only: the other choices find the
        prompt cached because of that one.
        """
        self._completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.num_right += delta.predicted[0]
            self.num_wrong += delta.predicted[1]
        if index % self.n == 0:
            self._cached_tokens += delta.cached_tokens

    def best_outputs(self, outputs: list[TokenDelta]) -> list[TokenDelta]:
        """For each prompt the ``n`` outputs with the highest mean logprob, the best one first.

        Only for requests that do not stream. The tokens of the others count in the usage.
        """
        if self.best_of == self.n:
            return outputs
        chosen = []
        for start in range(0, len(outputs), self.best_of):
            group = outputs[start : start + self.best_of]
            ranked = sorted(group, key=_mean_logprob, reverse=True)
            self._completion_tokens += sum(len(other.token_ids) for other in ranked[self.n :])
            # Only the first one generated has the prompt's data.
            ranked[0].cached_tokens = group[0].cached_tokens
            ranked[0].prompt_logprobs = group[0].prompt_logprobs
            chosen += ranked[: self.n]
        return chosen

    def text_frame(self, index: int, text: str) -> bytes:
        """The frame of a ``plain`` request that adds text to one choice."""
        frame = self._text_frames.get(index)
        if frame is None:
            before, _, after = self.frame(self.text_choice(index)).rpartition(b'""')
            frame = self._text_frames[index] = before, after
        return b"".join((frame[0], encode(text), frame[1]))

    def frame(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """A frame with one choice, of any kind."""
        if self._usage_in_frames:
            more["usage"] = self._usage()
        elif self._usage_at_end:
            more["usage"] = None
        return event(self.chunk_type(**self._head, choices=[choice], **more))

    def closing(self) -> bytes:
        ends: list[dict[str, Any]] = []
        if self._usage_at_end:
            ends.append({"usage": self._usage()})
        if self.explain is not None:
            ends.append({"trace": self.explain()})
        frames = [event(self.chunk_type(**self._head, choices=[], **end)) for end in ends]
        return b"".join(frames) + DONE

    def failure(self, error: Exception) -> bytes:
        return error_frame(error) + DONE

    lost = failure

    def whole(self, choices: Iterable[msgspec.Struct], **more: Any) -> bytes:
        """The answer of a request that does not stream."""
        if self.explain is not None:
            more["trace"] = self.explain()
        items = list(map(encode, choices))  # which may count their tokens
        answer = self.answer_type(**self._head, choices=[], usage=self._usage(), **more)
        return encode_with(answer, "choices", items)

    def _usage(self) -> schemas.Usage:
        return usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


def _mean_logprob(output: TokenDelta) -> float:
    entries = output.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else 0.0
