"""What a response says: its output items, and the events that tell of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import AsyncLLMError
from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body
from asyncllm.server.openai.content_logprobs import ContentLogprobs
from asyncllm.server.responses.items import OutputItem, begin_item
from asyncllm.server.streaming.frames import EVENT_STREAM, named_event
from asyncllm.text.parsing import Content, End, ToolStart
from asyncllm.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncllm.server.chat.conversation import Conversation
    from asyncllm.text.parsing import Event
    from asyncllm.types import TokenDelta, TokenLogprob

_STATUS: Final = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
#: OpenAI's codes of failed responses, by the status that the error has of itself.
_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseReply:
    """One response, from its first token to its end.

    Attributes:
        response: the response as it stands.
    """

    content_type = EVENT_STREAM
    explain: Callable[[], dict[str, Any]] | None = None

    def __init__(
        self,
        head: dict[str, Any],
        conversation: Conversation,
        *,
        tells: bool,
        keep: Callable[[dict[str, Any]], None],
        write_logprobs: Callable[[Sequence[TokenLogprob]], list[dict[str, Any]]] | None,
    ):
        """
        Args:
            head: what of the response is known before it is made; ``status`` is "queued" or
                "in_progress".
            tells: whether anybody reads the events.
            keep: called once, with the response when it has ended.
            write_logprobs: how the logprobs of some tokens are written; None when none were asked
                for.
        """
        self.response = head
        self.id: str = head["id"]
        self._turn = conversation.turn()
        self._prompt_tokens = len(conversation.prompt_ids)
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._tells = tells
        self._keep = keep
        self._write_logprobs = write_logprobs
        self._logprobs = None
        if write_logprobs is not None:
            self._logprobs = ContentLogprobs(self._turn, conversation.places())
        self._open: OutputItem | None = None
        self._told = 0
        self._finish: FinishReason | None = None

    def opening(self) -> bytes:
        if self.response["status"] == "queued":
            return self._lifecycle("created") + self._lifecycle("queued")
        return self._lifecycle("created") + self._lifecycle("in_progress")

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        told = []
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            told.append(self._lifecycle("in_progress"))
        self._completion_tokens += len(delta.token_ids)
        events = self._turn.read(delta)
        told += map(self._add, events, self._scores(delta, events))
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._cached_tokens = min(delta.cached_tokens, self._prompt_tokens)
            if self._open is None and not self.response["output"]:
                told.append(self._begin(Content("")))  # clients read the text of empty answers too
            stopped = delta.finish_reason is FinishReason.STOP
            told.append(self._end("completed" if stopped else "incomplete"))
        return b"".join(told)

    def closing(self) -> bytes:
        self._complete()
        status = self.response["status"]
        return self._lifecycle("completed" if status == "completed" else "incomplete")

    def failure(self, error: Exception) -> bytes:
        told = self._end("incomplete")
        status = error.status if isinstance(error, AsyncLLMError) else 500
        detail = error_body(error)["error"]
        self.response["status"] = "failed"
        self.response["error"] = {
            "code": _CODES.get(status, "server_error"),
            "message": detail["message"],
        }
        self._keep(self.response)
        return told + self._lifecycle("failed")

    def body(self, outputs: list[TokenDelta]) -> bytes:
        self.frames(0, outputs[0])
        self._complete()
        return encode(self.response)

    def _complete(self) -> None:
        assert self._finish is not None
        status = self.response["status"] = _STATUS[self._finish]
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "completed":
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = self._usage()
        if self.explain is not None:
            self.response["trace"] = self.explain()
        self._keep(self.response)

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self._cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self._completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens},
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }

    def _scores(self, delta: TokenDelta, events: list[Event]) -> list[list[dict[str, Any]]]:
        """For each event the logprobs of its tokens, if they are wanted."""
        if self._logprobs is None or self._write_logprobs is None:
            return [[] for _ in events]
        return [self._write_logprobs(each) for each in self._logprobs.of(delta, events)]

    def _add(self, event: Event, logprobs: list[dict[str, Any]]) -> bytes:
        """Tell what an event of the turn adds to the open item, or to one that begins with it."""
        told = b""
        if self._open is None or not self._open.takes(event):
            told = self._end("completed") + self._begin(event)
        assert self._open is not None
        if isinstance(event, ToolStart | End) or not event.text:
            return told
        self._open.add(event.text, logprobs)
        if self._tells:
            told += self._open.delta(event.text, logprobs, self._told)
            self._told += 1
        return told

    def _begin(self, event: Event) -> bytes:
        output = self.response["output"]
        self._open = begin_item(event, self.response["id"], len(output))
        output.append(self._open.item)
        return self._tell(self._open.added())

    def _end(self, status: str) -> bytes:
        """The open item, if there is one, is over."""
        if self._open is None:
            return b""
        ended, self._open = self._open, None
        return self._tell(ended.done(status))

    def _lifecycle(self, name: str) -> bytes:
        return self._tell([{"type": f"response.{name}", "response": self.response}])

    def _tell(self, bodies: Sequence[dict[str, Any]]) -> bytes:
        if not self._tells:
            return b""
        first, self._told = self._told, self._told + len(bodies)
        numbered = ({**body, "sequence_number": n} for n, body in enumerate(bodies, first))
        return b"".join(map(named_event, numbered))
