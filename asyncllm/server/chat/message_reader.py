"""Reads and counts one answer as its tokens come: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import UNSET, UnsetType

from asyncllm.server.trace import Trace
from asyncllm.text.chat_reader import TokenPlaces
from asyncllm.text.parsing import Content, End, Event, Parser, Reasoning, ToolStart, finish_reason
from asyncllm.types import FinishReason, TokenDelta


class MessageReader:
    """Reads the deltas of one sequence; every route writes the events in its own format.

    Args:
        parser: None when all text is content.
        reasoning_ends: token ids that end the reasoning.
        places: counts reasoning tokens by their places in the text; needed if no single token
            ends the reasoning.
        only_calls: whether a grammar restricts the answer to calls.

    Attributes:
        reasoning_tokens: tokens of reasoning so far, markers included.
    """

    def __init__(
        self,
        parser: Parser | None,
        reasoning_ends: frozenset[int] = frozenset(),
        places: TokenPlaces | None = None,
        *,
        only_calls: bool = False,
    ):
        self.reasoning_tokens = 0
        self._parser = parser
        self._reasoning_ends = reasoning_ends
        self._may_reason = parser is not None
        self._has_reasoned = False
        self._places = places
        self._only_calls = only_calls
        self._starts: list[int] = []  # of the tokens, by ``places``, while they may be reasoning
        self._length = 0  # of the text, where there is no parser

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def read(self, delta: TokenDelta) -> list[Event]:
        """The events of a delta, in order; the last delta also flushes what was held back."""
        if self._parser is None:
            self._length += len(delta.text)
            return [Content(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._finish(self._parser, delta)
        if self._may_reason and self._places is not None:
            self._find_reasoning(self._parser, self._places, delta.token_ids, events)
        elif self._may_reason:
            self._count_reasoning(delta.token_ids, events)
        if delta.finish_reason is None:
            return events  # only the last ones hold an End
        return [event for event in events if not isinstance(event, End)]

    def finish_reason(self, delta: TokenDelta) -> Literal["stop", "length", "tool_calls", "abort"]:
        """OpenAI's ``finish_reason``, once the last delta has been read."""
        assert delta.finish_reason is not None
        if self._parser is None:
            return delta.finish_reason.value
        breaks_off = self.breaks_off(delta)
        return finish_reason(delta.finish_reason, self._parser.num_calls, breaks_off=breaks_off)

    def breaks_off(self, delta: TokenDelta) -> bool:
        """Whether the last call is not whole: the model did not end it by the last delta."""
        in_call = self._parser is not None and self._parser.in_call
        return in_call and not _stopped(delta)

    def _finish(self, parser: Parser, delta: TokenDelta) -> list[Event]:
        """The events of the text that was held back."""
        stopped = _stopped(delta)
        events = parser.finish(cut_off=not stopped)
        if self._only_calls and not stopped:
            # The incomplete beginning of a forced call is markup, not content.
            return [event for event in events if not isinstance(event, Content)]
        return events

    def record_places(self) -> None:
        """Record places for ``take_places``; called before the first delta."""
        if self._parser is not None:
            self._parser.record_places()

    def take_places(self, events: list[Event]) -> list[tuple[int, int]]:
        """The places of the content of the latest ``events`` in the text.

        Start and end, in characters, of each piece; an event may have several.
        """
        if self._parser is not None:
            return self._parser.take_places()
        contents = (event for event in events if isinstance(event, Content))
        return [(self._length - len(event.text), self._length) for event in contents]

    def _find_reasoning(
        self, parser: Parser, places: TokenPlaces, token_ids: list[int], events: list[Event]
    ) -> None:
        """Reasoning comes first: count the tokens that begin before its end."""
        self._starts += [places.next(token)[0] for token in token_ids]
        end = parser.reasoning_end
        if end is not None:
            self.reasoning_tokens = sum(start < end for start in self._starts)
        elif parser.in_reasoning:
            self.reasoning_tokens = len(self._starts)
            return
        elif not any(isinstance(event, Content | ToolStart) for event in events):
            return  # only whitespace or part of a marker so far
        self._may_reason = False
        self._starts.clear()

    def _count_reasoning(self, token_ids: list[int], events: list[Event]) -> None:
        """Reasoning comes first: count the tokens up to its end."""
        for event in events:
            if isinstance(event, Reasoning):
                self._has_reasoned = True
            else:
                self._may_reason = False
        for count, token in enumerate(token_ids, 1):
            if token in self._reasoning_ends:
                self._may_reason = False
                self.reasoning_tokens += count
                return
        self.reasoning_tokens += len(token_ids)
        if not self._may_reason and not self._has_reasoned:
            self.reasoning_tokens = 0


def _stopped(delta: TokenDelta) -> bool:
    """Whether it was the model that ended the answer."""
    return delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str)


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
