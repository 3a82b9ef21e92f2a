"""The process's side of everything but plans and results: a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any

from asyncllm.executor.process.reports import (
    Compile,
    Compiled,
    Forget,
    FromProcess,
    KernelsReady,
    KernelsWanted,
    Refused,
    decode_to_process,
    encode,
)
from asyncllm.text.grammar.spec import decode_spec
from asyncllm.text.structured import StructuredOutput
from asyncllm.wire.socket_channel import SocketLink

log = logging.getLogger(__name__)


class Control:
    """Reports to the event loop, and compiles the grammars that it wants, beside the steps.

    Args:
        end: the process's end of the socket.
        structured: compiles grammars, and has those that are known when steps need them.
    """

    def __init__(self, end: socket.socket, structured: StructuredOutput):
        self._structured = structured
        self._loop = asyncio.new_event_loop()
        self._link = SocketLink(self._loop, end, self._on_message, self._loop.stop)
        self._kernels_ready = threading.Event()
        self._compiling: dict[int, asyncio.Task[None]] = {}
        #: Grammars that the event loop has not given up, by their numbers.
        self._held: dict[int, Any] = {}
        threading.Thread(target=self._serve, name="control", daemon=True).start()

    def tell(self, report: FromProcess) -> None:
        """Send a report; returns when the socket has it. From any other thread."""

        async def send() -> None:
            self._link.send(encode(report))

        asyncio.run_coroutine_threadsafe(send(), self._loop).result()

    def await_kernels(self) -> None:
        """Wait until nobody compiles kernels any more."""
        self.tell(KernelsWanted())
        self._kernels_ready.wait()

    def _serve(self) -> None:
        self._loop.run_forever()  # until the other side has ended
        self._loop.close()

    def _on_message(self, message: bytes) -> None:
        wanted = decode_to_process(message)
        if isinstance(wanted, KernelsReady):
            self._kernels_ready.set()
        elif isinstance(wanted, Compile):
            task = self._loop.create_task(self._compile(wanted))
            self._compiling[wanted.number] = task
        else:
            self._forget(wanted)

    async def _compile(self, wanted: Compile) -> None:
        answer: FromProcess = Compiled(wanted.number)
        try:
            spec = decode_spec(wanted.spec)
            self._held[wanted.number] = await self._structured.compile(spec)
        except Exception as error:
            answer = Refused.of(wanted.number, error)
            if answer.kind == "other":
                log.exception("compiling a grammar failed")
        finally:
            del self._compiling[wanted.number]
        self._link.send(encode(answer))

    def _forget(self, wanted: Forget) -> None:
        self._held.pop(wanted.number, None)
        if (task := self._compiling.get(wanted.number)) is not None:
            task.cancel()
