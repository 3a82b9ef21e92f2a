"""A server that hangs: ``... serve_hanging WHERE DRAIN GRACE [OPTIONS [SLOW]]``.

The engine is the real one; its worker takes plans and never answers, answers each after SLOW
seconds ("slow step", "compile"), raises ("raise"), or is never built. OPTIONS are fields of
``ServerConfig``, as JSON.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from asyncllm.config import EngineLimits
from asyncllm.config.server_config import ServerConfig
from asyncllm.executor.thread_executor import ThreadExecutor
from asyncllm.llm import load as loading
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.server.run import run
from asyncllm.wire.messages import StepResult, decode_plan, pack

if TYPE_CHECKING:
    from asyncllm.wire.channel import ThreadChannel

FOREVER = 3600.0

LIMITS = EngineLimits(
    device="cpu",
    dtype="float32",
    num_pages=64,
    page_size=16,
    max_model_len=1024,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    prefill_chunk=512,
    itl_target=0.0,
    prefix_caching=True,
    host_pages=0,
    page_copy_seconds=0.0,
    max_waiting=16,
    max_waiting_tokens=4096,
    steps_in_flight=2,
    vocab_size=384,
    eos_token_ids=(2,),
)


class HangingWorker:
    limits = LIMITS

    def __init__(self, where: str = "step", slow_seconds: float = 1.0):
        self._where = where
        self._slow_seconds = slow_seconds

    def run(self, channel: ThreadChannel) -> None:
        while (message := channel.receive()) is not None:
            if not message:
                continue
            plan = decode_plan(message)
            channel.heartbeat.enter("compile" if self._where == "compile" else "wait", plan.step)
            if self._where == "raise":
                raise RuntimeError("planted")
            if self._where not in ("slow step", "compile"):
                time.sleep(FOREVER)
            time.sleep(self._slow_seconds)
            channel.heartbeat.enter("idle")
            now, tokens = time.perf_counter(), pack([97] * (len(plan.rows) // 12))
            channel.post(StepResult(plan.step, tokens, (), None, now, now))


class HangingLLM(AsyncLLM):
    def __init__(self, where: str):
        super().__init__(device="cpu")
        self._where = where

    async def start(self) -> Any:
        await super().start()
        loop = asyncio.get_running_loop()
        if self._where == "thread pool":
            loop.run_in_executor(None, time.sleep, FOREVER)
        elif self._where == "thread":
            threading.Thread(target=time.sleep, args=(FOREVER,), name="straggler").start()
        elif self._where == "exit":
            atexit.register(time.sleep, FOREVER)
        return self

    async def stopped(self) -> str:
        """Called when the server is ready."""
        if self._where in ("loop", "spinning loop"):
            print("hanging", flush=True)
            if self._where == "loop":
                time.sleep(FOREVER)  # noqa: ASYNC251
            _spin()
        return await super().stopped()

    async def aclose(self) -> None:
        if self._where == "closing":
            await asyncio.sleep(FOREVER)
        if self._where == "interpreter's lock":
            ctypes.PyDLL(None).sleep(int(FOREVER))  # unlike CDLL, it keeps the lock
        await super().aclose()


def _spin() -> None:
    while True:
        pass


def main(
    where: str, drain_seconds: str, grace_seconds: str, options: str = "{}", slow_seconds: str = "1"
) -> int:
    def build() -> HangingWorker:
        if where == "loading":
            print("loading", flush=True)
            time.sleep(FOREVER)
        return HangingWorker(where, float(slow_seconds))

    def find(*_: Any) -> Any:
        print("loading", flush=True)
        time.sleep(FOREVER)

    patched: Any = loading
    patched.ThreadExecutor = lambda _, launch_seconds: ThreadExecutor(build, launch_seconds)
    if where == "download":
        patched.resolve_folder = find
    llm = HangingLLM(where)
    if where == "download":
        llm = AsyncLLM("some/model", device="cpu")  # type: ignore[assignment]
    config = ServerConfig(port=0, drain_seconds=float(drain_seconds), **json.loads(options))
    return run(lambda: llm, config, grace_seconds=float(grace_seconds))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
