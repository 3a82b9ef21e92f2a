"""A message in Anthropic's format: its content blocks, the events of its stream, its errors."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any, Final

import msgspec
from aiohttp import web

from asyncllm.server.anthropic import schemas
from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.message_reader import SingleReply
from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_response, error_text, known_error
from asyncllm.server.http.middleware import request_id
from asyncllm.server.streaming.frames import EVENT_STREAM, named_event
from asyncllm.text.parsing import Content, Event, Reasoning, ToolArguments, ToolStart
from asyncllm.types import FinishReason, TokenDelta

#: Types of errors, by the HTTP status.
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PIECES: Final[dict[type[Event], Any]] = {
    Content: schemas.TextPiece,
    Reasoning: schemas.ThinkingPiece,
    ToolArguments: schemas.InputPiece,
}


class _Block:
    """One content block while it grows.

    Attributes:
        content: empty until the block has ended.
    """

    content: schemas.ContentBlock

    def __init__(self, event: Event, index: int):
        self._index = index
        self._texts: list[str] = []
        self._takes: type[Event] = type(event)
        match event:
            case ToolStart(_, id, name):
                self._takes = ToolArguments
                self.content = schemas.ToolUseContent(id=id, name=name, input={})
            case Reasoning():
                self.content = schemas.ThinkingContent(thinking="", signature="")
            case _:
                self.content = schemas.TextContent(text="")

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this block."""
        return isinstance(event, self._takes)

    def start(self) -> bytes:
        return named_event(schemas.ContentBlockStart(index=self._index, content_block=self.content))

    def add(self, event: Content | Reasoning | ToolArguments) -> bytes:
        self._texts.append(event.text)
        return self._delta(_PIECES[type(event)](event.text))

    def stop(self) -> bytes:
        text = "".join(self._texts)
        signed = b""
        match self.content:
            case schemas.TextContent() as content:
                content.text = text
            case schemas.ThinkingContent() as content:
                # Clients require a signature and send it back; it proves nothing.
                signature = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
                content.thinking, content.signature = text, signature
                signed = self._delta(schemas.SignaturePiece(signature))
            case schemas.ToolUseContent() as content:
                content.input = _arguments(text)
        return signed + named_event(schemas.ContentBlockStop(index=self._index))

    def _delta(self, piece: schemas.Piece) -> bytes:
        return named_event(schemas.ContentBlockDelta(index=self._index, delta=piece))


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; none if they are nested too deeply."""
    try:
        arguments: dict[str, Any] = msgspec.json.decode(text)
    except RecursionError:
        return {}
    return arguments


class MessageReply(SingleReply):
    """One message, from its first token to its end."""

    content_type = EVENT_STREAM

    def __init__(
        self, model: str, conversation: Conversation, *, context: int, kept_unit: int | None = None
    ):
        """
        Args:
            context: the most tokens of prompt and answer together.
            kept_unit: the prompt stays in the cache, in units of so many tokens; None: maybe.
        """
        super().__init__(conversation.message_reader(), len(conversation.prompt_ids))
        self._context = context
        self._kept = 0 if kept_unit is None else self.prompt_tokens // kept_unit * kept_unit
        self.id = f"msg_{uuid.uuid4().hex}"
        self._message = schemas.AnthropicMessage(
            id=self.id,
            role="assistant",
            model=model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )
        self._open: _Block | None = None

    def opening(self) -> bytes:
        return named_event(schemas.MessageStart(message=self._message)) + named_event(
            schemas.Ping()
        )

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        frames = [self._add(event) for event in self.read(delta)]
        if delta.finish_reason is not None:
            self._set_stop(delta)
            frames.append(self._end_block())
        return b"".join(frames)

    def closing(self) -> bytes:
        message = self._message
        stop = schemas.Stop(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        end = schemas.MessageEnd(delta=stop, usage=self._usage(), trace=self.trace())
        return named_event(end) + named_event(schemas.StreamEnd())

    def failure(self, error: Exception) -> bytes:
        return named_event(anthropic_error(error))

    lost = failure

    def body(self, outputs: list[TokenDelta]) -> bytes:
        self.frames(0, outputs[0])
        self._message.usage = self._usage()
        self._message.trace = self.trace()
        return encode(self._message)

    def _add(self, event: Event) -> bytes:
        frames = b""
        if self._open is None or not self._open.takes(event):
            frames = self._end_block()
            self._open = _Block(event, len(self._message.content))
            self._message.content.append(self._open.content)
            frames += self._open.start()
        if isinstance(event, Content | Reasoning | ToolArguments) and event.text:
            frames += self._open.add(event)
        return frames

    def _end_block(self) -> bytes:
        block, self._open = self._open, None
        return b"" if block is None else block.stop()

    def _set_stop(self, delta: TokenDelta) -> None:
        """An aborted message is paused: a client may ask to continue it."""
        message = self._message
        if delta.finish_reason is FinishReason.ABORT:
            message.stop_reason = "pause_turn"
        elif delta.finish_reason is FinishReason.LENGTH:
            full = self.prompt_tokens + self.completion_tokens >= self._context
            message.stop_reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(delta.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", delta.stop_reason
        else:
            message.stop_reason = "tool_use" if self.reader.num_calls else "end_turn"

    def _usage(self) -> schemas.AnthropicUsage:
        """Anthropic counts tokens found in the cache, and those put there, apart from the input."""
        created = max(0, self._kept - self.cached_tokens)
        return schemas.AnthropicUsage(
            input_tokens=self.prompt_tokens - self.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=self.cached_tokens,
            output_tokens=self.completion_tokens,
            output_tokens_details=schemas.ThinkingDetails(
                thinking_tokens=self.reader.reasoning_tokens
            ),
        )


def anthropic_error(error: Exception) -> schemas.AnthropicError:
    status = known_error(error).status
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = schemas.AnthropicErrorDetail(type=kind, message=error_text(error))
    return schemas.AnthropicError(error=detail, request_id=request_id.get())


def anthropic_error_response(error: Exception) -> web.Response:
    response = error_response(error)
    response.body = encode(anthropic_error(error))
    return response
