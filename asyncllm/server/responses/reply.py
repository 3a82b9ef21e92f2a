"""A response from its first token to its end, and the events of its stream.

Also a compaction: a summary in place of a conversation that gets too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.message_reader import SingleReply
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_text, known_error
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai.logprobs import ContentLogprobs, token_logprobs
from asyncllm.server.openai.schemas import TokenLogprob
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses import schemas
from asyncllm.server.responses.item_schemas import ItemStatus, seal
from asyncllm.server.responses.output import EventWriter, OpenItem, item_id, open_item
from asyncllm.server.responses.tools import Offers
from asyncllm.server.streaming.frames import EVENT_STREAM, named_event
from asyncllm.text.parsing import Content, Event, Reasoning, ToolArguments
from asyncllm.types import FinishReason, TokenDelta

#: What the model is asked at the end of the conversation, whose cached prefix serves it.
_ASKED: Final = (
    "Summarize this conversation. The summary replaces it: you will go on with nothing else. Say "
    "what the user wants and has said about how, what was decided and why, what was done and found "
    "(with the names of files, commands and functions that matter, and errors word by word), and "
    "what is left to do. Call no tools. Write the summary and nothing else."
)
#: Most tokens of a summary, unless the request says otherwise.
_MOST: Final = 4096
_STATUS: Final[dict[FinishReason | None, schemas.Status]] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}


class ResponseReply(SingleReply):
    """One response.

    Attributes:
        response: the response as it stands.
    """

    content_type = EVENT_STREAM

    def __init__(
        self,
        response: schemas.Response,
        conversation: Conversation,
        *,
        streams: bool,
        keep: Callable[[schemas.Response], None],
        tokenizer: Tokenizer | None,
        offers: Offers,
        seals: bool,
    ):
        """
        Args:
            response: its ``status`` is "queued" or "in_progress".
            streams: whether anybody reads the events.
            keep: called once, when the response has ended.
            tokenizer: None where no logprobs are wanted.
            offers: the tools that may be called.
            seals: whether reasoning is also in a form for clients that keep it.
        """
        super().__init__(conversation.message_reader(), len(conversation.prompt_ids))
        self.response = response
        self.id = response.id
        self._offers = offers
        self._seals = seals
        self._keep = keep
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._logprobs = ContentLogprobs(self.reader, conversation.places())
        self._events = EventWriter(active=streams)
        self._open: OpenItem | None = None

    def opening(self) -> bytes:
        created = self._lifecycle(schemas.ResponseCreated)
        if self.response.status == "queued":
            return created + self._lifecycle(schemas.ResponseQueued)
        return created + self._lifecycle(schemas.ResponseInProgress)

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        frames = []
        if self.response.status == "queued":
            self.response.status = "in_progress"
            frames.append(self._lifecycle(schemas.ResponseInProgress))
        events = self.read(delta)
        frames += map(self._add, events, self._logprobs_of(delta, events))
        if delta.finish_reason is not None:
            if self._open is None and not self.response.output:
                frames.append(self._begin(Content("")))  # clients expect a text in every answer
            stopped = delta.finish_reason is FinishReason.STOP
            frames.append(self._close("completed" if stopped else "incomplete"))
        return b"".join(frames)

    def closing(self) -> bytes:
        self._complete()
        if self.response.status == "completed":
            return self._lifecycle(schemas.ResponseCompleted)
        return self._lifecycle(schemas.ResponseIncomplete)

    def failure(self, error: Exception) -> bytes:
        frames = self._close("incomplete")
        self.response.status = "failed"
        self.response.error = schemas.ResponseFailure(
            code=schemas.FAILURE_CODES.get(known_error(error).status, "server_error"),
            message=error_text(error),
        )
        self._keep(self.response)
        return frames + self._lifecycle(schemas.ResponseFailed)

    def lost(self, error: Exception) -> bytes:
        return named_event(schemas.StreamError(sequence_number=0, message=error_text(error)))

    def body(self, outputs: list[TokenDelta]) -> bytes:
        self.frames(0, outputs[0])
        self._complete()
        return encode(self.response)

    def _complete(self) -> None:
        response = self.response
        response.status = _STATUS[self.finish_reason]
        if response.status == "incomplete":
            response.incomplete_details = schemas.IncompleteDetails(reason="max_output_tokens")
        elif response.status == "completed":
            response.completed_at = int(time.time())
        response.usage = schemas.ResponseUsage(
            input_tokens=self.prompt_tokens,
            input_tokens_details=schemas.InputTokensDetails(
                cached_tokens=self.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=self.completion_tokens,
            output_tokens_details=schemas.OutputTokensDetails(
                reasoning_tokens=self.reader.reasoning_tokens
            ),
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )
        response.trace = self.trace()
        self._keep(response)

    def _logprobs_of(self, delta: TokenDelta, events: list[Event]) -> list[list[TokenLogprob]]:
        """For each event the logprobs of its tokens, if they are wanted."""
        if self._tokenizer is None:
            return [[] for _ in events]
        found = self._logprobs.of(delta, events)
        return [token_logprobs(entries, self._tokenizer) for entries in found]

    def _add(self, event: Event, logprobs: list[TokenLogprob]) -> bytes:
        """Add an event to the open item, or to a new one."""
        frames = b""
        if self._open is None or not self._open.takes(event):
            frames = self._close("completed") + self._begin(event)
        assert self._open is not None
        if isinstance(event, Content | Reasoning | ToolArguments) and event.text:
            frames += self._open.add(event.text, logprobs)
        return frames

    def _begin(self, event: Event) -> bytes:
        output = self.response.output
        at = len(output)
        self._open = open_item(event, self.id, at, self._events, self._offers, seals=self._seals)
        output.append(self._open.item)
        return self._open.open()

    def _close(self, status: ItemStatus) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        closed = item.close(status)
        self.response.output[-1] = item.item
        return closed

    def _lifecycle(self, kind: type[schemas.LifecycleEvent]) -> bytes:
        return self._events.write(kind, response=self.response)


def ask_for_summary(chat: ChatRequest, context: int) -> None:
    """Make a chat end with the question for a summary.

    Args:
        context: tokens of prompt and answer together.
    """
    chat.messages = [*chat.messages, {"role": "user", "content": _ASKED}]
    chat.response_format = None
    if chat.tools:
        chat.tool_choice = "auto"  # the prompt keeps the tools, for the cache
    chat.max_tokens = chat.max_tokens or max(1, min(_MOST, context // 4))


class CompactionReply(ResponseReply):
    """A response whose only item is a compaction."""

    def __init__(self, *parts: Any, kept: Sequence[items.Item] | None = None, **options: Any):
        """
        Args:
            kept: items, whose messages of users the answer repeats; None for an answer that is a
                response.
        """
        super().__init__(*parts, **options)
        self._kept = kept
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        for event in self.read(delta):
            match event:
                case Content(text):
                    self._texts.append(text)
                case Reasoning(text):
                    self._thoughts.append(text)
        if delta.finish_reason is None:
            return b""
        if delta.finish_reason is FinishReason.LENGTH:
            self.finish_reason = FinishReason.STOP  # a long summary serves as well
        summary = "".join(self._texts).strip() or "".join(self._thoughts).strip()
        sealed = seal(summary or "(There is none.)")
        item = items.CompactionItem(id=item_id("cmp_", self.id, 0), encrypted_content=sealed)
        self.response.output.append(item)
        added = self._events.write(schemas.OutputItemAdded, output_index=0, item=item)
        return added + self._events.write(schemas.OutputItemDone, output_index=0, item=item)

    def body(self, outputs: list[TokenDelta]) -> bytes:
        whole = super().body(outputs)
        if self._kept is None:
            return whole
        response = self.response
        assert response.usage is not None
        [*_, compaction] = response.output
        assert isinstance(compaction, items.CompactionItem)
        said = [each for each in self._kept if isinstance(each, items.MessageItem)]
        return encode(
            schemas.CompactedResponse(
                id=response.id,
                created_at=response.created_at,
                output=[*(each for each in said if each.role == "user"), compaction],
                usage=response.usage,
            )
        )
