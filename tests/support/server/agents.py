"""The agents whose conversations are tests: those over Messages and Responses, and all by name."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.support.server.agent import RULES, SCHEMA, Agent, Call
from tests.support.server.chat_agents import (
    Cline,
    LangGraph,
    OldCline,
    OpenCode,
    OpenWebUI,
    QwenCode,
)


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
            "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
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
            result = {"type": "tool_result", "tool_use_id": id, "content": content}
            self._add("user", result | {"is_error": False})
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
    """OpenAI's Responses, with nothing stored; a patch is text for a tool.

    A goal is the result of a call that no model has made.
    """

    ignored = frozenset(
        ("tools[2].web_search", "include", "text.verbosity", "reasoning.summary", "client_metadata")
    )

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
            "client_metadata": {"session": "s"},
            "max_output_tokens": 2,
            "store": False,
            "stream": True,
        }

    def user(self, text: str) -> None:
        self._say("user", text)

    def note(self, text: str) -> None:
        self._say("developer", "The goal is now:")
        goal = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent"}
        self.items.append({**goal, "output": text})

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
    "old_cline": OldCline,
    "qwen_code": QwenCode,
    "langgraph": LangGraph,
    "open_webui": OpenWebUI,
}


def _parsed(arguments: str) -> Any:
    """As an API has it that takes no text: what could not be parsed is text nevertheless."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
