"""A body goes straight from its route to the engine: each module has it once, few twice."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any

import msgspec
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.embedded.exchange import InProcess
from asyncllm.server.embedded.httpx_transport import async_client
from asyncllm.types import SamplingParams, SchedulingParams
from tests.support.server.fake_llm import FakeLLM

SERVER = "asyncllm.server."
#: What is made of a body, besides Structs of the modules named ``requests``.
MADE = (bytearray, SamplingParams, SchedulingParams, Conversation)

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "stream": True}
MORE = {"tools": [TOOL], "temperature": 0.5, "stop": ["."], "thinking_token_budget": 9}


def is_of_body(value: Any, depth: int = 2) -> bool:
    """Whether an argument is a body, a part of one, or what was made of it."""
    if isinstance(value, msgspec.Struct) and type(value).__module__.endswith(".requests"):
        return True
    if isinstance(value, MADE) or (isinstance(value, Mapping) and "role" in value):
        return True
    if depth and isinstance(value, Mapping):
        return any(is_of_body(each, depth - 1) for each in value.values())
    if depth and isinstance(value, Sequence) and not isinstance(value, str):
        return any(is_of_body(each, depth - 1) for each in value[:3])
    return False


def names_of_arguments(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    return code.co_varnames[:count] + code.co_freevars


class Walk:
    """The modules of the server whose functions get the body, in the order of the calls."""

    def __init__(self, handler: str) -> None:
        self.stays: list[str] = []
        self._handler = handler
        self._ended = False
        self._seen: set[int] = set()
        self._frames: list[FrameType] = []  # kept, so that their ids are not used again

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or self._ended or id(frame) in self._seen:
            return  # a coroutine that goes on is a call, too
        if not self.stays and code.co_name != self._handler:
            return
        if code is FakeLLM.submit.__code__:
            self._ended = True
        # Reading a large body in a thread is no reading of its own, nor is a comprehension.
        if code.co_name.startswith(("<", "read_large")) or not module.startswith(SERVER):
            return
        arguments = (frame.f_locals.get(name) for name in names_of_arguments(code))
        if not self.stays or any(map(is_of_body, arguments)):
            self._seen.add(id(frame))
            self._frames.append(frame)
            if self.stays[-1:] != [module.removeprefix(SERVER)]:
                self.stays.append(module.removeprefix(SERVER))


@pytest.mark.parametrize(
    ("path", "handler", "body", "most_modules", "most_returns"),
    [
        ("/v1/chat/completions", "chat_completions", CHAT, 12, 3),
        ("/v1/chat/completions", "chat_completions", CHAT | MORE, 12, 3),
        ("/v1/completions", "completions", {"prompt": "Hi."}, 9, 3),
        ("/v1/messages", "create_message", CHAT | {"model": "fake"}, 11, 3),
        ("/v1/responses", "create_response", {"input": "Hi."}, 13, 12),
        ("/api/chat", "ollama_chat", {"model": "fake"} | CHAT, 9, 3),
        ("/generate", "generate", {"prompt": "Hi.", "max_tokens": 4}, 6, 1),
    ],
)
async def test_a_body_walks_straight(
    path: str, handler: str, body: dict[str, Any], most_modules: int, most_returns: int
) -> None:
    llm = FakeLLM()
    await llm.start()
    walk = Walk(handler)
    async with async_client(InProcess(llm, ServerConfig())) as client:
        before = sys.getprofile()
        sys.setprofile(walk.profile)
        try:
            response = await client.post(path, json=body)
        finally:
            sys.setprofile(before)
    await llm.aclose()
    assert response.status_code == 200, response.text
    modules = set(walk.stays)
    assert {"http.parse", "chat.parameters", "service", "streaming.live"} <= modules
    assert len(modules) <= most_modules, walk.stays
    assert len(walk.stays) - len(modules) <= most_returns, walk.stays
