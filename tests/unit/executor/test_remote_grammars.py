"""Grammars that another process compiles; here, a thread plays that process."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncllm.errors import BadRequest, EngineDead, QueueFull
from asyncllm.executor.process.grammars import RemoteGrammars
from asyncllm.executor.process.main import Control
from asyncllm.executor.process.reports import (
    Compiled,
    Refused,
    ToProcess,
    decode_from_process,
    encode,
)
from asyncllm.text.grammar import GrammarSpec, JsonSchema, Regex
from asyncllm.text.grammar.spec import cache_key
from asyncllm.wire.socket_channel import SocketLink

HUGE = JsonSchema({"maximum": 10**40, "enum": [1.0, 1, "ü", None, True]})


class Compiler:
    """Stands for ``StructuredOutput``.

    Attributes:
        alive: the grammars that anybody has.
        asked: specs, in order.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.asked: list[GrammarSpec] = []
        self.cancelled = 0

    async def compile(self, spec: GrammarSpec) -> object:
        self.asked.append(spec)
        if spec == Regex("bad"):
            raise BadRequest("planted", param="else")
        if spec == Regex("full"):
            raise QueueFull("planted", retry_after=7.0)
        if spec == Regex("bug"):
            raise ArithmeticError("planted")
        if spec == Regex("slow"):
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled += 1

        class Grammar: ...

        grammar = Grammar()
        self.alive.add(grammar)
        return grammar


class Sides:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.compiler = Compiler()
        Control(theirs, self.compiler)  # type: ignore[arg-type]
        self.link = SocketLink(asyncio.get_running_loop(), ours, self._on_message)
        self.grammars = RemoteGrammars(self._send)

    def _send(self, message: ToProcess) -> None:
        self.link.send(encode(message))

    def _on_message(self, message: bytes) -> None:
        report = decode_from_process(message)
        assert isinstance(report, Compiled | Refused)
        self.grammars.answered(report)


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    made = Sides()
    yield made
    made.link.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (nobody tells when)
            await asyncio.sleep(0.001)


async def test_a_grammar_is_kept_as_long_as_somebody_has_it(sides: Sides) -> None:
    first, second = await asyncio.gather(*map(sides.grammars.compile, (HUGE, HUGE)))
    assert first.key == second.key == cache_key(HUGE)
    assert sides.compiler.asked == [HUGE, HUGE]
    assert len(sides.compiler.alive) == 2
    del first
    gc.collect()
    await until(lambda: len(sides.compiler.alive) == 1)
    del second
    await until(lambda: not sides.compiler.alive)


@pytest.mark.parametrize(
    ("pattern", "error"), [("bad", BadRequest), ("full", QueueFull), ("bug", RuntimeError)]
)
async def test_errors_cross(sides: Sides, pattern: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="planted") as raised:
        await sides.grammars.compile(Regex(pattern))
    if isinstance(raised.value, BadRequest):
        assert raised.value.param == "grammar"
    if isinstance(raised.value, QueueFull):
        assert raised.value.retry_after == 7.0
    assert await sides.grammars.compile(Regex("good"))


@pytest.mark.parametrize("spec", [5, Regex("\ud800"), JsonSchema({"a": b"bytes"})])
async def test_what_cannot_be_sent_is_refused_here(sides: Sides, spec: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        await sides.grammars.compile(spec)
    assert refused.value.param == "grammar"
    assert sides.compiler.asked == []


async def test_a_caller_that_gives_up_ends_the_work(sides: Sides) -> None:
    task = asyncio.create_task(sides.grammars.compile(Regex("slow")))
    await until(lambda: sides.compiler.asked)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: sides.compiler.cancelled == 1)


async def test_when_the_process_is_lost_nobody_waits(sides: Sides) -> None:
    task = asyncio.create_task(sides.grammars.compile(Regex("slow")))
    await until(lambda: sides.compiler.asked)
    sides.grammars.close(EngineDead("planted"))
    for grammar in (task, sides.grammars.compile(Regex("late"))):
        with pytest.raises(EngineDead, match="planted"):
            await grammar
