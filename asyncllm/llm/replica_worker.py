"""The process of one replica: an AsyncLLM, told what to do by the program that started it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from typing import Any

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest
from asyncllm.executor.team.peer_main import enter_team
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.llm.replicas.link import Link, pack_error, unpack
from asyncllm.system.event_loop import new_event_loop
from asyncllm.types import SamplingParams, SchedulingParams, TokenDelta
from asyncllm.types.beam_search import BeamSearchParams


class Settings(msgspec.Struct):
    """``socket``: a descriptor."""

    socket: int
    config: EngineConfig


class _Sink:
    """Sends what a request delivers; all of one turn of the loop in one message."""

    def __init__(self, worker: Worker, number: int):
        self._worker = worker
        self._number = number

    def emit(self, delta: TokenDelta) -> None:
        if delta.prompt_logprobs is not None:
            delta.prompt_logprobs = list(delta.prompt_logprobs)
        self._worker.deliver(self._number, delta)
        if delta.finish_reason is not None:
            self._worker.ended(self._number)

    def fail(self, error: Exception) -> None:
        self._worker.deliver(self._number, pack_error(error))
        self._worker.ended(self._number)


class Worker:
    """Runs requests by the numbers that the program gives them."""

    def __init__(self, llm: AsyncLLM):
        self._llm = llm
        self._link: Link | None = None
        self._running: dict[int, int] = {}  # engine's ids
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[tuple[int, Any]] = []
        self._ended = asyncio.Event()

    async def run(self, connection: socket.socket) -> None:
        """Until the program closes the connection, or the engine dies."""
        self._link = link = Link(connection, self._on_message, self._ended.set)
        try:
            await self._llm.start()
        except Exception as error:
            link.send("failed", pack_error(error))
            link.finish()
            return
        link.send("ready", self._llm.limits)
        stopped = asyncio.ensure_future(self._llm.stopped())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait([stopped, ended], return_when=asyncio.FIRST_COMPLETED)
        self._flush()
        if stopped.done():
            link.send("died", stopped.result())
        stopped.cancel()
        ended.cancel()
        link.finish()
        await self._llm.aclose()

    def deliver(self, number: int, what: Any) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((number, what))

    def ended(self, number: int) -> None:
        self._running.pop(number, None)

    def _flush(self) -> None:
        if self._outbox and self._link is not None:
            self._link.send("deltas", self._outbox)
            self._outbox = []

    def _on_message(self, kind: str, number: int, packed: bytes = b"") -> None:
        if kind == "abort":
            if (task := self._tasks.get(number)) is not None:
                task.cancel()
            if (engine_id := self._running.pop(number, None)) is not None:
                self._llm.abort(engine_id)
            return
        try:
            parts = unpack(packed)
        except BadRequest as error:
            self.deliver(number, pack_error(error))
            return
        work = self._generate if kind == "add" else self._search
        task = asyncio.get_running_loop().create_task(work(number, *parts))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _generate(
        self,
        number: int,
        ids: list[int],
        params: SamplingParams,
        scheduling: SchedulingParams | None,
    ) -> None:
        sink = _Sink(self, number)
        try:
            ready = await self._llm.prepare(params)
            self._running[number] = self._llm.submit(ids, ready, sink, scheduling)
        except Exception as error:
            sink.fail(error)

    async def _search(
        self,
        number: int,
        ids: list[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None,
    ) -> None:
        try:
            self.deliver(number, await self._llm.beam_search(ids, params, scheduling))
        except Exception as error:
            self.deliver(number, pack_error(error))


def main() -> None:
    settings, _ = enter_team(Settings, "replica")
    os.set_inheritable(settings.socket, False)
    gc.freeze()
    connection = socket.socket(fileno=settings.socket)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(Worker(AsyncLLM(config=settings.config)).run(connection))


if __name__ == "__main__":
    main()
