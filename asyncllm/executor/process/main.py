"""The executor's process: rank 0, with a worker as the executor thread has it.

The main thread runs the worker. Other threads load the tokenizer and serve ``Control``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.executor.process.reports import (
    Compile,
    Compiled,
    Failed,
    Forget,
    FromProcess,
    KernelsReady,
    KernelsWanted,
    Progress,
    Refused,
    Started,
    decode_to_process,
    encode,
)
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.machines import Machines
from asyncllm.executor.team.peer_main import enter_team
from asyncllm.executor.team.status import PeerHeartbeat, PeerStatus
from asyncllm.models.spec import read_spec
from asyncllm.text.grammar.spec import decode_spec
from asyncllm.text.structured import StructuredOutput
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.wire.channel import LeaderChannel
from asyncllm.wire.socket_channel import SocketChannel, SocketLink


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


log = logging.getLogger(__name__)


class ExecutorSettings(msgspec.Struct, frozen=True):
    """What the process starts with.

    Attributes:
        folder: of the model.
        text_folder: of the tokenizer.
        plans, control: descriptors of sockets.
        log_level: as a number.
        machines: as ``build_leader`` takes it.
    """

    config: EngineConfig
    folder: str
    text_folder: str
    plans: int
    control: int
    log_level: int
    machines: Machines | None


def main() -> None:
    settings, status = enter_team(ExecutorSettings)
    logging.getLogger().setLevel(settings.log_level)
    structured = StructuredOutput()
    control = Control(socket.socket(fileno=settings.control), structured)
    try:
        run = _load(settings, status, control, structured)
        status.set("idle", -1)
        run(SocketChannel(socket.socket(fileno=settings.plans), PeerHeartbeat(status)))
    except BaseException as error:
        failed = Failed.of(error)
        if failed.kind == "other":
            log.exception("the executor ends")
        control.tell(failed)
        sys.exit(1)
    finally:
        structured.close()


def _load(
    settings: ExecutorSettings, status: PeerStatus, control: Control, structured: StructuredOutput
) -> Callable[[LeaderChannel], None]:
    """What serves a channel, once the model is loaded."""
    config, folder, bill = settings.config, Path(settings.folder), StartupBill()
    spec = read_spec(folder, config.hf_overrides)
    status.set("importing", -1)
    with bill.phase("import"):
        from asyncllm.executor.leader import build_leader

    status.set("loading", -1)
    with ThreadPoolExecutor(1) as threads:
        # It needs the GIL all the time, as imports do; reading weights does not.
        tokenizer = threads.submit(Tokenizer.from_folder, Path(settings.text_folder))
        leader = build_leader(
            config,
            folder,
            spec,
            lambda done, total: control.tell(Progress(done, total)),
            bill,
            structured,
            control.await_kernels,
            settings.machines,
        )
    limits = leader.limits
    structured.open(tokenizer.result(), limits.vocab_size, limits.eos_token_ids)
    # As in the server: a full collection would hold up a step.
    gc.freeze()
    control.tell(Started(limits, tuple(bill.items)))
    return leader.run


if __name__ == "__main__":
    main()
