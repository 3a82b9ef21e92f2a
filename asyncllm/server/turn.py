"""What one answer of a chat says, as its tokens come: text, reasoning and tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.text.parsing import Content, End, Event, Reasoning

if TYPE_CHECKING:
    from asyncllm.text.parsing import Parser
    from asyncllm.types import TokenDelta


class Turn:
    """Reads the deltas of one sequence; every route writes what it says in its own words.

    Args:
        parser: None when all text is content.
        reasoning_ends: token ids that end the reasoning.

    Attributes:
        reasoning_tokens: how many of the tokens were reasoning, its markers included.
    """

    def __init__(self, parser: Parser | None, reasoning_ends: frozenset[int] = frozenset()):
        self.reasoning_tokens = 0
        self._parser = parser
        self._reasoning_ends = reasoning_ends
        self._may_reason = parser is not None
        self._has_reasoned = False

    @property
    def splits(self) -> bool:
        """Whether the text may hold more than content."""
        return self._parser is not None

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def read(self, delta: TokenDelta) -> list[Event]:
        """What a delta adds, in order; all that was held back comes with the last one."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if self._may_reason:
            self._count_reasoning(delta.token_ids, events)
        return [event for event in events if not isinstance(event, End)]

    def _count_reasoning(self, token_ids: list[int], events: list[Event]) -> None:
        """Reasoning comes first, so what counts is where it ends."""
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
