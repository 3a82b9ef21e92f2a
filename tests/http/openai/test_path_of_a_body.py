"""A chat's body goes straight from its route to the engine: each module has it once, few twice."""

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
BODY = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "stream": True}


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


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "temperature": 0.5, "stop": ["."]}])
async def test_a_chats_body_walks_straight(more: dict[str, Any]) -> None:
    llm = FakeLLM()
    await llm.start()
    walk = Walk("chat_completions")
    async with async_client(InProcess(llm, ServerConfig())) as client:
        before = sys.getprofile()
        sys.setprofile(walk.profile)
        try:
            response = await client.post("/v1/chat/completions", json=BODY | more)
        finally:
            sys.setprofile(before)
    await llm.aclose()
    assert response.status_code == 200, response.text
    modules = set(walk.stays)
    assert {"openai.chat", "http.parse", "chat.conversation", "streaming.live"} <= modules
    assert len(modules) <= 12, walk.stays
    assert len(walk.stays) - len(modules) <= 3, walk.stays
