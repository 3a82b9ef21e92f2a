"""An answer in Ollama's format: a line of JSON for each piece, or one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from asyncllm.server.chat.message_reader import MessageReader, SingleReply
from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_response, error_text
from asyncllm.server.model import Tokenizer
from asyncllm.server.ollama import schemas
from asyncllm.server.openai.logprobs import token_logprobs
from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.text.parsing import Content, Event, Reasoning, ToolArguments, ToolStart, message_of
from asyncllm.types import TokenDelta

LINES: Final = "application/x-ndjson"


class Piece(NamedTuple):
    """A part of an answer; ``calls`` are whole."""

    content: str = ""
    thinking: str = ""
    calls: tuple[schemas.OllamaCall, ...] = ()


#: Makes a route's answer of a piece; the keywords are the fields of ``OllamaAnswer``.
Write: TypeAlias = Callable[..., schemas.OllamaAnswer]


def chat_answer(piece: Piece, **fields: Any) -> schemas.OllamaChat:
    """For /api/chat."""
    message = schemas.OllamaAnswerMessage(
        role="assistant",
        content=piece.content,
        thinking=piece.thinking or UNSET,
        tool_calls=list(piece.calls) or UNSET,
    )
    return schemas.OllamaChat(message=message, **fields)


def generate_answer(piece: Piece, **fields: Any) -> schemas.OllamaGenerated:
    """For /api/generate, where there are no calls."""
    thinking = piece.thinking or UNSET
    return schemas.OllamaGenerated(response=piece.content, thinking=thinking, **fields)


def timestamp(seconds: float | None = None) -> str:
    """A time in Ollama's format, now if ``seconds`` since 1970 are None."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


class OllamaReply(SingleReply):
    """One answer, from its first token to its end."""

    id = ""
    content_type = LINES

    def __init__(
        self,
        model: str,
        reader: MessageReader,
        write: Write,
        *,
        prompt_tokens: int,
        began: int,
        tokenizer: Tokenizer | None,
    ):
        """
        Args:
            began: when the request came, in ``time.perf_counter_ns()``.
            tokenizer: None where no logprobs are wanted.
        """
        super().__init__(reader, prompt_tokens)
        self._model = model
        self._write = write
        self._began = began
        self._tokenizer = tokenizer
        self._call: ToolStart | None = None  # the call in progress, and its arguments so far
        self._arguments: list[str] = []

    def opening(self) -> bytes:
        return b""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        pieces = list(self._pieces(self.read(delta), delta))
        if self._tokenizer is None:
            return b"".join(map(self._line, pieces))
        # The first line carries the logprobs of the tokens; there is one even without a text.
        first, *others = pieces or [Piece()]
        line = self._line(first, logprobs=self._logprobs(delta))
        return line + b"".join(map(self._line, others))

    def closing(self) -> bytes:
        return self._encode(Piece(), **self._end()) + b"\n"

    def failure(self, error: Exception) -> bytes:
        return ollama_error(error) + b"\n"

    lost = failure

    def body(self, outputs: list[TokenDelta]) -> bytes:
        [output] = outputs
        message = message_of(self.read(output))
        calls = [
            _call(i, call.id, call.name, call.arguments) for i, call in enumerate(message.calls)
        ]
        if self.reader.breaks_off(output):
            calls.pop()
        whole = Piece(message.content, message.reasoning, tuple(calls))
        return self._encode(whole, logprobs=self._logprobs(output), **self._end())

    def _pieces(self, events: list[Event], delta: TokenDelta) -> Iterator[Piece]:
        """The pieces that events add; a call is added when it is over, and is whole.

        Ollama has no field that says of a call that it was cut off, and nobody should make it.
        """
        for event in events:
            match event:
                case ToolArguments(_, text):
                    self._arguments.append(text)
                case ToolStart():
                    yield from self._take_call()
                    self._call, self._arguments = event, []
                case Content(text):
                    yield from self._take_call()
                    yield Piece(content=text)
                case Reasoning(text):
                    yield Piece(thinking=text)
        if delta.finish_reason is not None and not self.reader.breaks_off(delta):
            yield from self._take_call()

    def _take_call(self) -> Iterator[Piece]:
        start, self._call = self._call, None
        if start is not None:
            call = _call(start.index, start.id, start.name, "".join(self._arguments))
            yield Piece(calls=(call,))

    def _line(self, piece: Piece, **fields: Any) -> bytes:
        return self._encode(piece, done=False, **fields) + b"\n"

    def _encode(self, piece: Piece, **fields: Any) -> bytes:
        return encode(self._write(piece, model=self._model, created_at=timestamp(), **fields))

    def _logprobs(self, delta: TokenDelta) -> list[TokenLogprob] | UnsetType:
        if self._tokenizer is None:
            return UNSET
        logprobs: list[TokenLogprob] = token_logprobs(delta.logprobs or (), self._tokenizer)
        return logprobs

    def _end(self) -> dict[str, Any]:
        """Why it ended, and the counters; durations in nanoseconds.

        As in Ollama, the time in the queue belongs to ``load_duration``.
        """
        total = time.perf_counter_ns() - self._began
        prompt, answer = self._durations()
        return {
            "done": True,
            "done_reason": self.finish_reason,
            "total_duration": total,
            "load_duration": max(0, total - prompt - answer),
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": self.completion_tokens,
            "eval_duration": answer,
        }

    def _durations(self) -> tuple[int, int]:
        """Nanoseconds of the prompt, up to the first token, and of the answer."""
        trace = self.trace()
        for sequence in trace.sequences if trace else ():
            start, first, end = sequence.started_ms, sequence.first_token_ms, sequence.ended_ms
            if start is not None and first is not None and end is not None:
                return int((first - start) * 1e6), int((end - first) * 1e6)
        return 0, 0


def _call(index: int, id: str, name: str, arguments: str) -> schemas.OllamaCall:
    found = msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    function = schemas.OllamaFunction(index=index, name=name, arguments=found)
    return schemas.OllamaCall(id=id, function=function)


def ollama_error(error: Exception) -> bytes:
    return encode(schemas.OllamaError(error=error_text(error)))


def ollama_error_response(error: Exception) -> web.Response:
    """Ollama answers 503 when its queue is full."""
    response = error_response(error)
    if response.status == 429:
        response.set_status(503)
    response.body = ollama_error(error)
    return response
