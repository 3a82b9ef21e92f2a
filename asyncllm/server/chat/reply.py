"""The base of replies in other APIs' formats: reads and counts one answer."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from asyncllm.server.chat.message_reader import MessageReader
from asyncllm.server.trace import Trace
from asyncllm.text.parsing import Event
from asyncllm.types import FinishReason, TokenDelta


class SingleReply:
    """Reads one answer to a chat; a subclass writes it in the format of its API.

    Attributes:
        explain: see ``Reply``.
        cached_tokens: of the prompt; known once the answer has ended.
    """

    explain: Callable[[], Trace] | None = None

    def __init__(self, reader: MessageReader, prompt_tokens: int):
        self.reader = reader
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def read(self, delta: TokenDelta) -> list[Event]:
        """Count a delta's tokens, and parse its text."""
        self.completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.cached_tokens = min(delta.cached_tokens, self.prompt_tokens)
        return self.reader.read(delta)

    def trace(self) -> Trace | UnsetType:
        return UNSET if self.explain is None else self.explain()
