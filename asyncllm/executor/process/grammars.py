"""Structured output of a model whose executor is another process: grammars are compiled there."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncllm.errors import BadRequest, EngineDead
from asyncllm.executor.process.reports import Compile, Compiled, Forget, Refused, ToProcess
from asyncllm.system.daemon_thread import run_in_daemon
from asyncllm.text.grammar import GrammarSpec
from asyncllm.text.grammar.spec import encode_spec, key_of
from asyncllm.text.tokenizer import Tokenizer


class RemoteGrammar:
    """A compiled grammar, which the process keeps as long as anybody has this."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: bytes):
        self.key = key


class RemoteGrammars:
    """Asks the executor's process for grammars; belongs to the event loop.

    Args:
        send: hands the process a message.
    """

    def __init__(self, send: Callable[[ToProcess], None]):
        self._send = send
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self._dead: EngineDead | None = None

    def open(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """Does nothing: the process has a tokenizer of its own."""

    async def compile(self, spec: Any) -> RemoteGrammar:
        """As ``StructuredOutput.compile``.

        Raises:
            BadRequest, QueueFull: as that does.
            EngineDead: the process has ended.
        """
        if not isinstance(spec, GrammarSpec):
            raise BadRequest("grammar must be a GrammarSpec", param="grammar")
        try:
            encoded = await run_in_daemon(encode_spec, spec)
        except BadRequest as error:
            raise BadRequest(error.message, param="grammar") from error
        if self._dead is not None:
            raise self._dead
        loop = asyncio.get_running_loop()
        self._last = number = self._last + 1
        self._waiting[number] = answer = loop.create_future()
        self._send(Compile(number, encoded))
        try:
            await answer
        except BaseException:
            self._send(Forget(number))
            raise
        finally:
            self._waiting.pop(number, None)
        grammar = RemoteGrammar(key_of(encoded))
        weakref.finalize(grammar, self._forget_soon, loop, number).atexit = False
        return grammar

    def answered(self, answer: Compiled | Refused) -> None:
        """The process has compiled a grammar, or refused it."""
        waiting = self._waiting.get(answer.number)
        if waiting is None or waiting.done():  # given up meanwhile
            return
        if isinstance(answer, Compiled):
            waiting.set_result(None)
        else:
            waiting.set_exception(answer.error())

    def close(self, cause: EngineDead | None = None) -> None:
        """No answers will come any more."""
        self._dead = cause or EngineDead("engine closed")
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._dead)

    def _forget_soon(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """In whatever thread drops the last reference."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._send, Forget(number))
