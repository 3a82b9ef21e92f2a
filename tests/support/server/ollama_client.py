"""Ollama's routes on a fake model, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ollama

from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS, Formats
from tests.support.server.fake_llm import FakeLLM, FakeTemplate
from tests.support.server.serving import Server

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "aé"}]}
ECHO = "user: aé\nassistant: "


class LastMessage(FakeTemplate):
    """The last message is the whole prompt, so the model answers with it."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.seen = (messages, options)
        text: str = messages[-1]["content"]
        return text


def speaker() -> FakeLLM:
    llm = FakeLLM(formats=Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"]))
    llm.chat_template = LastMessage()
    return llm


def client(server: Server, **options: Any) -> ollama.Client:
    return ollama.Client(server.url, **options)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}
