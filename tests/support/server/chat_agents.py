"""Agents over chat completions."""

from __future__ import annotations

from typing import Any

from tests.support.server.agent import RULES, SCHEMA, Agent, Call


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
    """Notes are the user's; null as content beside calls."""

    def body(self) -> dict[str, Any]:
        return super().body() | {"stream": True, "stream_options": {"include_usage": True}}

    def note(self, text: str) -> None:
        self.user(text)

    def interrupt(self, text: str) -> None:
        self.results(["The user has interrupted this."] * len(self.open_calls))
        self.user(text)


class QwenCode(ChatAgent):
    """Parts of text, in results too; an answer of the agent's own; no choice of tools."""

    def __init__(self, rules: str = RULES) -> None:
        super().__init__(rules)
        self.user("This is the context of our chat.")
        self.answer("Got it. Thanks for the context!", [], None)

    def body(self) -> dict[str, Any]:
        body = super().body() | {"stream": True, "stream_options": {"include_usage": True}}
        del body["tool_choice"]
        return body

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def note(self, text: str) -> None:
        self.user(f"<system-reminder>\n{text}\n</system-reminder>")

    def results(self, texts: list[str]) -> None:
        super().results(texts)
        for message in self.messages[-len(texts) :]:
            message["content"] = [{"type": "text", "text": message["content"]}]

    def compact(self, summary: str) -> None:
        self.messages = self.messages[:1]
        self.user(summary)
        self.answer("Got it. Thanks for the additional context!", [], None)


class OldCline(ChatAgent):
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
        sampling = {"temperature": 0.5, "stop": ["~~"], "seed": 1, "logit_bias": {"5": 1}}
        body = super().body() | sampling | {"reasoning_effort": "low", "stream": True}
        del body["tool_choice"]
        return body | {"stream_options": {"include_usage": True}}

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


def _function(name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"The tool {name}.", "parameters": SCHEMA}
    return {"type": "function", "function": function}
