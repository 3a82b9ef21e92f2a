"""The kernels of a model that is being loaded, compiled in other processes meanwhile."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from asyncllm.daemon_thread import run_in_daemon
from asyncllm.errors import EngineDead, KernelError
from asyncllm.startup.kernel_compiler import KernelCompiler, job_of

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.config import EngineConfig

log = logging.getLogger(__name__)


class CompileAhead:
    """Starts at once what is missing in the kernel cache; belongs to the running loop.

    Whatever goes wrong here costs time only: a kernel that is not in the cache is compiled when it
    is first launched.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.ensure_future(_start(config, folder))

    def wait(self) -> None:
        """Wait for the kernels, in another thread than the loop's.

        Raises:
            EngineDead: ``stop`` was called.
        """

        async def started() -> KernelCompiler | None:
            return await asyncio.shield(self._starting)

        try:
            compiler = asyncio.run_coroutine_threadsafe(started(), self._loop).result()
        except CancelledError:
            raise EngineDead("loading was abandoned") from None
        if compiler is None:
            return
        try:
            compiler.wait()
        except KernelError as error:
            if compiler.is_stopped:
                raise EngineDead("loading was abandoned") from None
            log.warning("kernels are compiled at their first launch: %s", error.message)

    def stop(self) -> None:
        """Give up; ``wait`` fails."""
        self._starting.cancel()
        compiler = self._compiler()
        if compiler is not None:
            compiler.stop()

    def close(self) -> None:
        """Leave nothing behind. Nobody may be waiting."""
        self._starting.cancel()
        compiler = self._compiler()
        if compiler is not None:
            compiler.close()

    def _compiler(self) -> KernelCompiler | None:
        done = self._starting.done() and not self._starting.cancelled()
        return self._starting.result() if done else None


async def _start(config: EngineConfig, folder: Path) -> KernelCompiler | None:
    if config.gpu is None:
        return None
    try:
        job = await run_in_daemon(job_of, config, folder)  # CUDA's driver takes its time
        # In the loop's thread: the process ends with the thread that started it.
        return None if job is None else KernelCompiler(job)
    except Exception as error:  # nothing that goes wrong here may end loading
        log.warning("kernels are compiled at their first launch: %s", error)
        return None
