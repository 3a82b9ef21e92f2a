"""The kernels of a model that is being loaded, compiled in other processes meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineDead, KernelError
from asyncllm.executor.startup.compile_job import CompileJob
from asyncllm.executor.startup.kernel_compiler import KernelCompiler, expects_job, job_of

log = logging.getLogger(__name__)


class CompileAhead:
    """Starts at once what is missing in the kernel cache, in a thread of its own.

    Whatever goes wrong here costs time only: a kernel that is not in the cache is compiled when it
    is first launched.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._started: Future[KernelCompiler | None] = Future()
        self._closed = threading.Event()
        if config.gpu is None:
            self._started.set_result(None)
            return
        parts = config, folder
        threading.Thread(target=self._run, args=parts, name="asyncllm-kernels", daemon=True).start()

    def wait(self) -> None:
        """Wait for the kernels, in another thread than the loop's.

        Raises:
            EngineDead: ``stop`` was called.
        """
        try:
            compiler = self._started.result()
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
        if not self._started.cancel():
            compiler = self._started.result()
            if compiler is not None:
                compiler.stop()

    def close(self) -> None:
        """Leave nothing behind. Nobody may be waiting."""
        if not self._started.cancel():
            compiler = self._started.result()
            if compiler is not None:
                compiler.close()
        self._closed.set()

    def _run(self, config: EngineConfig, folder: Path) -> None:
        job: CompileJob | None = None
        early: KernelCompiler | None = None
        compiler: KernelCompiler | None = None
        with _logged():
            # CUDA's driver takes its time, during which the compiler imports torch.
            early = KernelCompiler() if expects_job(config, folder) else None
            job = job_of(config, folder)
        is_wanted = self._started.set_running_or_notify_cancel()
        with _logged():
            if is_wanted and job is not None:
                compiler = early or KernelCompiler()
                compiler.begin(job)
        if early is not None and compiler is None:
            early.close()
        if not is_wanted:
            return
        self._started.set_result(compiler)
        if compiler is not None:
            self._closed.wait()  # the process ends with the thread that started it


@contextmanager
def _logged() -> Iterator[None]:
    """Nothing that goes wrong here may end loading."""
    try:
        yield
    except Exception as error:
        log.warning("kernels are compiled at their first launch: %s", error)
