"""What a message of Anthropic's says: its content blocks, and the events that tell of them."""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.server.anthropic.errors import error_event
from asyncllm.server.http.answer import encode
from asyncllm.server.streaming.frames import EVENT_STREAM, TextEvents, named_event
from asyncllm.text.parsing import Content, End, Reasoning, ToolArguments, ToolStart
from asyncllm.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.server.chat.conversation import Conversation
    from asyncllm.text.parsing import Event
    from asyncllm.types import TokenDelta

#: The field of a block that its events add text to, and the kind of these events.
_DELTAS = {
    Content: ("text", "text_delta"),
    Reasoning: ("thinking", "thinking_delta"),
    ToolStart: ("partial_json", "input_json_delta"),
}


class _Block:
    """One content block, being made."""

    def __init__(self, event: Event, index: int):
        self._call = event if isinstance(event, ToolStart) else None
        self._takes = ToolArguments if self._call else type(event)
        self._index = index
        field, delta = _DELTAS[type(event)]
        self._field = field
        body = {"type": "content_block_delta", "index": index, "delta": {"type": delta, field: ""}}
        self._deltas = TextEvents(body)
        self._texts: list[str] = []

    def takes(self, event: Event) -> bool:
        """Whether an event goes on with this block."""
        return isinstance(event, self._takes)

    def start(self) -> bytes:
        return named_event(
            {
                "type": "content_block_start",
                "index": self._index,
                "content_block": self._content("", {}, ""),
            }
        )

    def add(self, text: str) -> bytes:
        self._texts.append(text)
        return self._deltas.write(text)

    def stop(self) -> bytes:
        signature = b""
        if self._field == "thinking":
            delta = {"type": "signature_delta", "signature": _signature("".join(self._texts))}
            body = {"type": "content_block_delta", "index": self._index, "delta": delta}
            signature = named_event(body)
        return signature + named_event({"type": "content_block_stop", "index": self._index})

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self._call is not None:
            return self._content("", _arguments(text), "")
        return self._content(text, {}, _signature(text))

    def _content(self, text: str, arguments: dict[str, Any], signature: str) -> dict[str, Any]:
        if self._call is not None:
            call = self._call
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
        if self._field == "thinking":
            return {"type": "thinking", "thinking": text, "signature": signature}
        return {"type": "text", "text": text}


def _signature(thinking: str) -> str:
    """Clients want one to be there, and send it back; it proves nothing."""
    return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    """Those of a call; none when they were cut off, or are no object."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessageReply:
    """One message, from its first token to its end."""

    content_type = EVENT_STREAM
    explain: Callable[[], dict[str, Any]] | None = None

    def __init__(self, model: str, conversation: Conversation, *, context: int):
        """``context``: how many tokens prompt and answer may have together."""
        self._turn = conversation.turn()
        self._prompt_tokens = len(conversation.prompt_ids)
        self._room = context - self._prompt_tokens
        self._output_tokens = 0
        self._cached_tokens = 0
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks: list[_Block] = []
        self._open = False  # whether the last block is
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            **self._stop,
            "usage": self._usage(),
        }
        start = named_event({"type": "message_start", "message": message})
        return start + named_event({"type": "ping"})

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self._output_tokens += len(delta.token_ids)
        told = [self._add(event) for event in self._turn.read(delta)]
        if delta.finish_reason is not None:
            self._cached_tokens = min(delta.cached_tokens, self._prompt_tokens)
            self._stop = self._reason(delta)
            told.append(self._end())
        return b"".join(told)

    def closing(self) -> bytes:
        body: dict[str, Any] = {"delta": self._stop, "usage": self._usage()}
        if self.explain is not None:
            body["trace"] = self.explain()
        return named_event({"type": "message_delta", **body}) + named_event(
            {"type": "message_stop"}
        )

    def failure(self, error: Exception) -> bytes:
        return error_event(error)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        self.frames(0, outputs[0])
        content = [block.whole() for block in self._blocks]
        whole = {**self._head, "content": content, **self._stop, "usage": self._usage()}
        if self.explain is not None:
            whole["trace"] = self.explain()
        return encode(whole)

    def _add(self, event: Event) -> bytes:
        told = b""
        if not self._open or not self._blocks[-1].takes(event):
            told = self._end()
            block = _Block(event, len(self._blocks))
            self._blocks.append(block)
            self._open = True
            told += block.start()
        if isinstance(event, ToolStart | End) or not event.text:
            return told
        return told + self._blocks[-1].add(event.text)

    def _end(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        return self._blocks[-1].stop()

    def _reason(self, delta: TokenDelta) -> dict[str, str | None]:
        """Why the message ends; an aborted one may be gone on with."""
        reason, sequence = "end_turn", None
        if delta.finish_reason is FinishReason.ABORT:
            reason = "pause_turn"
        elif delta.finish_reason is FinishReason.LENGTH:
            full = self._output_tokens >= self._room
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(delta.stop_reason, str):
            reason, sequence = "stop_sequence", delta.stop_reason
        elif self._turn.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts what was cached apart from the input."""
        return {
            "input_tokens": self._prompt_tokens - self._cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"thinking_tokens": self._turn.reasoning_tokens},
        }
