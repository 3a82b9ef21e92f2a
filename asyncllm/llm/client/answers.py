"""Decodes the answers of a server with OpenAI's protocol: whole ones, frames, and errors.

The types are lenient, unlike those of our server: other servers add fields or leave some out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from asyncllm.errors import (
    AsyncLLMError,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    NotFound,
    NotReady,
    QueueFull,
    StepError,
    TooLarge,
    Unauthorized,
)
from asyncllm.types import (
    FinishReason,
    PromptLogprob,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)

T = TypeVar("T")

_TOKEN_ID = re.compile(r"token_id:(\d+)")

_BY_CODE: dict[str | None, type[AsyncLLMError]] = {
    kind.code: kind for kind in (Unauthorized, DeadlineExceeded, NotReady, EngineDead, StepError)
}
_BY_STATUS: dict[int, type[AsyncLLMError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: TooLarge,
    422: BadRequest,
    503: NotReady,
}
#: The status of an error in mid-stream, by its type.
_STATUS_OF_TYPE = {"invalid_request_error": 400, "timeout_error": 408, "rate_limit_error": 429}


class EmbeddingBody(msgspec.Struct):
    """``embedding`` is base64 of little-endian float32."""

    index: int
    embedding: str


class EmbeddingList(msgspec.Struct):
    data: list[EmbeddingBody]


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageBody(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Message(msgspec.Struct):
    content: str | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float


class ChatLogprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[TopLogprob] = []


class Logprobs(msgspec.Struct):
    """Chats have ``content``, completions the lists; the best alternatives come first."""

    content: list[ChatLogprob] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class PromptLogprobBody(msgspec.Struct):
    logprob: float
    rank: int | None = None


#: By token id; the prompt's own token comes first.
PromptLogprobs = list[dict[int, PromptLogprobBody] | None]


class Choice(msgspec.Struct):
    """A choice of either route; a chat's text is in ``message``, or in a frame's ``delta``."""

    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def to_delta(self, num_top: int = 0) -> TokenDelta:
        message = self.message or self.delta
        text = self.text if message is None else message.content
        ids = self.token_ids or []
        return TokenDelta(
            text=text or "",
            token_ids=ids,
            logprobs=None if self.logprobs is None else _logprobs(self.logprobs, ids, num_top),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class Answer(msgspec.Struct):
    """A whole answer, a frame of a stream, or an error."""

    choices: list[Choice] = []
    usage: UsageBody | None = None
    error: ErrorBody | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def to_delta(self, params: SamplingParams | None = None) -> TokenDelta:
        """The first choice, with as many alternatives as ``params`` ask for."""
        num_top = 0 if params is None else params.logprobs or 0
        delta = self.choices[0].to_delta(num_top) if self.choices else TokenDelta()
        entries = self.prompt_logprobs  # of chat; completions have them in the choice
        if entries is None and self.choices:
            entries = self.choices[0].prompt_logprobs
        wanted = None if params is None else params.prompt_logprobs
        if wanted is not None and entries is not None:
            delta.prompt_logprobs = [_prompt_logprob(entry, wanted) for entry in entries]
        return delta

    def to_usage(self) -> Usage:
        usage = self.usage or UsageBody()
        details = usage.prompt_tokens_details or Details()
        return Usage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens or 0)


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class ModelList(msgspec.Struct):
    data: list[Model]


class TokenCount(msgspec.Struct):
    count: int


class EventDecoder:
    """Splits chunks of bytes, cut anywhere, into the data of server-sent events."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that these bytes complete."""
        events = []
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


def decode(body: bytes, kind: type[T]) -> T:
    """
    Raises:
        AsyncLLMError: the body does not follow the protocol.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise AsyncLLMError(f"the server does not speak OpenAI's protocol: {error}") from error


def decode_frame(data: bytes) -> Answer:
    """A frame of a stream; ``[DONE]`` becomes an empty one.

    Raises:
        AsyncLLMError: the frame says that the request failed.
    """
    if data == b"[DONE]":
        return Answer()
    frame = decode(data, Answer)
    if frame.error is not None:
        raise _error(frame.error, _status(frame.error), {})
    return frame


def decode_error(status: int, headers: Mapping[str, str], body: bytes) -> AsyncLLMError:
    """The error behind an answer with a status of 400 or more."""
    try:
        error = msgspec.json.decode(body, type=Answer).error
    except msgspec.DecodeError:
        error = None
    if error is None:  # some proxy's page
        text = body[:200].decode(errors="replace").strip()
        error = ErrorBody(f"HTTP status {status}: {text}" if text else f"HTTP status {status}")
    return _error(error, status, headers)


def _status(error: ErrorBody) -> int:
    if isinstance(error.code, int):
        return error.code
    return _STATUS_OF_TYPE.get(error.type or "", 500)


def _error(error: ErrorBody, status: int, headers: Mapping[str, str]) -> AsyncLLMError:
    if status == QueueFull.status or error.code == QueueFull.code:
        return QueueFull(error.message, retry_after=_retry_after(headers))
    code = error.code if isinstance(error.code, str) else None
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, AsyncLLMError)
    return kind(error.message, param=error.param, code=code)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds. A date in Retry-After counts as one second."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return float(milliseconds) / 1000
        return float(headers.get("Retry-After", 1))
    except ValueError:
        return 1.0


def _logprobs(logprobs: Logprobs, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """The logprobs of the sampled tokens, each with its likeliest alternatives."""
    values: list[float | None]
    tops: list[list[tuple[str, float]]]
    if logprobs.content is not None:
        values = [entry.logprob for entry in logprobs.content]
        tops = [[(top.token, top.logprob) for top in e.top_logprobs] for e in logprobs.content]
    else:
        values = logprobs.token_logprobs or []
        tops = [list((top or {}).items()) for top in logprobs.top_logprobs or [None] * len(values)]
    return [
        TokenLogprob(token, value, _with_ids(top[:num_top]))
        for token, value, top in zip(token_ids, values, tops, strict=False)
        if value is not None
    ]


def _with_ids(top: list[tuple[str, float]]) -> tuple[tuple[int, float], ...]:
    """The alternatives named by token id; those named by text are ambiguous and dropped."""
    found = [(_TOKEN_ID.fullmatch(name), logprob) for name, logprob in top]
    return tuple((int(match[1]), logprob) for match, logprob in found if match)


def _prompt_logprob(
    entry: dict[int, PromptLogprobBody] | None, num_top: int
) -> PromptLogprob | None:
    if not entry:
        return None
    token, own = next(iter(entry.items()))
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    top = tuple((other, value.logprob) for other, value in ranked[:num_top])
    return PromptLogprob(token, own.logprob, top, own.rank or 1)
