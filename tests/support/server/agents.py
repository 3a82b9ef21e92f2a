"""Conversations as agents hold them: each agent keeps one, and makes the requests that it sends.

Written from the agents' public documentation and the requests that are public. A story tells what
happens; an agent writes it down in its own way.
"""

from __future__ import annotations

import json
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


class ChatAgent(Agent):
    """What agents over chat completions share."""

    form = "call_{:024d}"

    def __init__(self, rules: str = RULES) -> None:
        super().__init__(rules)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": rules}]

    def body(self) -> dict[str, Any]:
        """The other fields."""
        tools = [_function(name) for name in ("read", "edit")]
        return {"tools": tools, "tool_choice": "auto"}

    def request(self) -> tuple[str, dict[str, Any]]:
        body = {"model": "fake", "messages": self.messages, "max_tokens": 2, **self.body()}
        return "/v1/chat/completions", body

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def note(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for id, call in self._ids(calls, self.form)
            ]
        self.messages.append(message)

    def results(self, texts: list[str]) -> None:
        for (id, _), text in zip(self.open_calls, texts, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    def interrupt(self, text: str) -> None:
        self.user(text)

    def compact(self, summary: str) -> None:
        self.messages = [self.messages[0], {"role": "user", "content": summary}]


class OpenCode(ChatAgent):
    """Empty content instead of none; calls that were stopped get an error as result."""

    def body(self) -> dict[str, Any]:
        return super().body() | {"stream": True, "stream_options": {"include_usage": True}}

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        super().answer(text or "", calls, thought)
        if thought is not None:
            self.messages[-1]["reasoning_content"] = thought

    def note(self, text: str) -> None:
        self.user(f"<system-reminder>\n{text}\n</system-reminder>")

    def interrupt(self, text: str) -> None:
        self.results(["Tool execution aborted"] * len(self.open_calls))
        self.user(text)

    def compact(self, summary: str) -> None:
        self.messages = [
            self.messages[0],
            {"role": "user", "content": "What did we do so far?"},
            {"role": "assistant", "content": summary},
        ]


class Cline(ChatAgent):
    """No tools: calls are text of the model's, and results are text of the user's, in parts."""

    def body(self) -> dict[str, Any]:
        return {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}

    def user(self, text: str) -> None:
        details = "<environment_details>\n# Visible files\na.py\n</environment_details>"
        texts = [f"<task>\n{text}\n</task>", details]
        parts = [{"type": "text", "text": each} for each in texts]
        self.messages.append({"role": "user", "content": parts})

    def note(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        self._ids(calls, self.form)
        written = [f"<{call.name}>\n{call.arguments}\n</{call.name}>" for call in calls]
        content = "\n\n".join([*([text] if text else []), *written])
        self.messages.append({"role": "assistant", "content": content})

    def results(self, texts: list[str]) -> None:
        parts = [
            {"type": "text", "text": f"[{call.name}] Result:\n{text}"}
            for (_, call), text in zip(self.open_calls, texts, strict=True)
        ]
        self.messages.append({"role": "user", "content": parts})

    def compact(self, summary: str) -> None:
        self.messages = [self.messages[0], {"role": "user", "content": summary}]
        self.answer("I go on.", [], None)


class LangGraph(ChatAgent):
    """None as content; a summary is one more system message, behind which a result may stand."""

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        super().answer(text or None, calls, thought)
        self.messages[-1]["name"] = "agent"

    def body(self) -> dict[str, Any]:
        return super().body() | {"parallel_tool_calls": True, "n": 1, "stream": False}

    def compact(self, summary: str) -> None:
        kept = self.messages[-1:]
        self.messages = [self.messages[0], {"role": "system", "content": summary}, *kept]


class OpenWebUI(ChatAgent):
    """Calls with their index; an answer that was stopped stays as it was; nothing is compacted."""

    def body(self) -> dict[str, Any]:
        return super().body() | {"stream": True, "chat_id": "c", "features": {"web_search": False}}

    ignored = frozenset(("chat_id", "features"))

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        content = text or ""
        if thought is not None:
            content = f"<think>\n{thought}\n</think>\n{content}"
        super().answer(content, calls, thought)
        for index, call in enumerate(self.messages[-1].get("tool_calls", ())):
            call["index"] = index

    def interrupt(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": ""})
        self.user(text)

    def compact(self, summary: str) -> None:
        self.messages = [self.messages[0], {"role": "assistant", "content": summary}]


class ClaudeCode(Agent):
    """Anthropic's API, with a line in front that always changes, and tools of Anthropic's."""

    ignored = frozenset(("tools[2].web_search_20250305", "context_management"))

    def __init__(self, rules: str = RULES) -> None:
        super().__init__(rules)
        self.messages: list[dict[str, Any]] = []

    def request(self) -> tuple[str, dict[str, Any]]:
        number = next(self._numbers)
        line = (
            f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number};"
        )
        mark = {"type": "ephemeral"}
        tools: list[dict[str, Any]] = [
            {"name": name, "description": f"The tool {name}.", "input_schema": SCHEMA}
            for name in ("read", "edit")
        ]
        tools.append({"type": "web_search_20250305", "name": "web_search", "max_uses": 8})
        return "/v1/messages?beta=true", {
            "model": "fake",
            "max_tokens": 2,
            "system": [
                {"type": "text", "text": line},
                {"type": "text", "text": "You are a coding agent.", "cache_control": mark},
                {"type": "text", "text": self.rules, "cache_control": mark},
            ],
            "messages": self.messages,
            "tools": tools,
            "metadata": {"user_id": "user"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }

    def user(self, text: str) -> None:
        self._add("user", {"type": "text", "text": text})

    def note(self, text: str) -> None:
        self.messages.append({"role": "system", "content": text})

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        blocks: list[dict[str, Any]] = []
        if thought is not None:
            blocks.append({"type": "thinking", "thinking": thought, "signature": "s"})
        if text is not None:
            blocks.append({"type": "text", "text": text})
        for id, call in self._ids(calls, "toolu_{:024d}"):
            given = _parsed(call.arguments)
            blocks.append({"type": "tool_use", "id": id, "name": call.name, "input": given})
        self._add("assistant", *blocks)

    def results(self, texts: list[str]) -> None:
        for (id, _), text in zip(self.open_calls, texts, strict=True):
            content = [{"type": "text", "text": text}]
            self._add("user", {"type": "tool_result", "tool_use_id": id, "content": content})
        self._add("user", {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"})

    def interrupt(self, text: str) -> None:
        stopped = "[Request interrupted by user for tool use]"
        for id, _ in self.open_calls:
            block = {"type": "tool_result", "tool_use_id": id, "content": stopped, "is_error": True}
            self._add("user", block)
        self.user(stopped)
        self.user(text)

    def compact(self, summary: str) -> None:
        self.messages = []
        self.user(summary)

    def _add(self, role: str, *blocks: dict[str, Any]) -> None:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        self.messages[-1]["content"] += blocks


class Codex(Agent):
    """OpenAI's Responses, with nothing stored; a patch is text for a tool."""

    ignored = frozenset(("tools[2].web_search", "include", "text.verbosity", "reasoning.summary"))

    def __init__(self, rules: str = RULES) -> None:
        super().__init__(rules)
        self.items: list[dict[str, Any]] = []
        self._say("developer", "<permissions>\nAsk before you write.\n</permissions>")
        self._say("user", "<environment_context>\n<cwd>/home</cwd>\n</environment_context>")

    def request(self) -> tuple[str, dict[str, Any]]:
        custom = {"type": "custom", "name": "edit", "description": "Edits."}
        space = {"type": "namespace", "name": "mcp__notes__", "description": "", "tools": []}
        read = {"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}
        return "/v1/responses", {
            "model": "fake",
            "instructions": self.rules,
            "input": self.items,
            "tools": [read, custom, {"type": "web_search"}, space],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"},
            "prompt_cache_key": "k",
            "max_output_tokens": 2,
            "store": False,
            "stream": True,
        }

    def user(self, text: str) -> None:
        self._say("user", text)

    def note(self, text: str) -> None:
        self._say("developer", text)

    def answer(self, text: str | None, calls: list[Call], thought: str | None) -> None:
        if thought is not None:
            part = {"type": "summary_text", "text": thought}
            self.items.append({"type": "reasoning", "summary": [part], "content": None})
        if text is not None:
            part = {"type": "output_text", "text": text}
            self.items.append({"type": "message", "role": "assistant", "content": [part]})
        for id, call in self._ids(calls, "call_{:024d}"):
            if call.name == "edit":
                item = {"type": "custom_tool_call", "input": call.arguments}
            else:
                item = {"type": "function_call", "arguments": call.arguments}
            self.items.append({**item, "call_id": id, "name": call.name})

    def results(self, texts: list[str]) -> None:
        for (id, call), text in zip(self.open_calls, texts, strict=True):
            kind = "custom_tool_call" if call.name == "edit" else "function_call"
            self.items.append({"type": f"{kind}_output", "call_id": id, "output": text})

    def interrupt(self, text: str) -> None:
        self.results(["aborted by user after 1.5s"] * len(self.open_calls))
        self.user("<turn_aborted>\nThe user stopped the turn.\n</turn_aborted>")
        self.user(text)

    def compact(self, summary: str) -> None:
        said = [item for item in self.items if item.get("role") == "user"]
        self.items = [*said, {"type": "compaction", "encrypted_content": summary}]

    def _say(self, role: str, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self.items.append({"type": "message", "role": role, "content": [part]})


AGENTS: Final[dict[str, type[Agent]]] = {
    "claude_code": ClaudeCode,
    "codex": Codex,
    "opencode": OpenCode,
    "cline": Cline,
    "langgraph": LangGraph,
    "open_webui": OpenWebUI,
}


def _function(name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"The tool {name}.", "parameters": SCHEMA}
    return {"type": "function", "function": function}


def _parsed(arguments: str) -> Any:
    """As an API has it that takes no text: what could not be parsed is text nevertheless."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
