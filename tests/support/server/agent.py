"""Conversations as agents hold them: each agent keeps one, and makes the requests that it sends.

Written from the agents' public documentation and from what they send to this server. A story tells
what happens; an agent writes it down in its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any, Final, NamedTuple

#: What agents begin with, which is far longer as a rule.
RULES: Final = " ".join(f"Rule {i}: keep to what the user wants, and say so." for i in range(100))
SCHEMA: Final = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "A file."}},
    "required": ["path"],
    "additionalProperties": False,
}


class Call(NamedTuple):
    """A call that the model makes; ``arguments`` is what it wrote."""

    name: str
    arguments: str


class Agent(ABC):
    """One conversation.

    Attributes:
        rules: of the system prompt.
        said: texts that the next prompt must have.
        ignored: what the server leaves out of each request, by name.
    """

    ignored: frozenset[str] = frozenset()

    def __init__(self, rules: str = RULES) -> None:
        self.rules = rules
        self.said: list[str] = []
        self.open_calls: list[tuple[str, Call]] = []
        self._numbers = count(1)

    @abstractmethod
    def request(self) -> tuple[str, dict[str, Any]]:
        """The path and the body of the request for the next answer."""

    @abstractmethod
    def user(self, text: str) -> None:
        """The user says something."""

    @abstractmethod
    def note(self, text: str) -> None:
        """The agent reminds the model of something, in the middle of the conversation."""

    @abstractmethod
    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        """The model has answered."""

    @abstractmethod
    def results(self, texts: list[str]) -> None:
        """The calls have returned."""

    @abstractmethod
    def interrupt(self, text: str) -> None:
        """The user stops the calls, and says something else."""

    @abstractmethod
    def compact(self, summary: str) -> None:
        """The conversation is replaced by a summary."""

    def _ids(self, calls: list[Call], form: str) -> list[tuple[str, Call]]:
        self.open_calls = [(form.format(next(self._numbers)), call) for call in calls]
        return self.open_calls
