"""A process that compiles a model's kernels while the model loads."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.errors import KernelError
from asyncllm.executor.startup.compile_job import CompileJob, CompileReport, is_new
from asyncllm.kernels.cuda_driver import find_gpu, is_installed
from asyncllm.kernels.gpu import PRETEND

#: How long to wait for the next kernel before giving up; the slowest takes 5 s of CPU time.
STALL_SECONDS: Final = 60.0

#: Libraries start threads for these, which compilers that are forked would lack.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def expects_job(config: EngineConfig, folder: Path) -> bool:
    """Whether ``job_of`` will probably find something to do; takes less time, as no GPU is used."""
    try:
        return _can_compile(config) and is_installed() and is_new(config, folder)
    except OSError:
        return False


def job_of(config: EngineConfig, folder: Path) -> CompileJob | None:
    """What is to be compiled before a model can be served; None if there is nothing to do."""
    if config.gpu is None or not _can_compile(config):
        return None
    gpu = find_gpu(config.gpu)
    if gpu is None:
        return None
    try:
        job = CompileJob.of(config, folder, gpu)
        return None if job.is_done() else job
    except OSError:
        return None  # loading the model says what is wrong


def _can_compile(config: EngineConfig) -> bool:
    if config.gpu is None or sys.platform != "linux" or find_spec("triton") is None:
        return False
    return not os.environ.get(PRETEND)  # a pretended GPU's kernels run on the one here


class KernelCompiler:
    """A process that imports what compilers need, and then runs one job.

    Linux kills it when this process ends, or the thread that started it.

    Args:
        module: runs the job; another one than ``compile_kernels`` must read and report as it does.

    Attributes:
        is_stopped: whether ``stop`` was called.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, module: str = "asyncllm.executor.startup.compile_kernels") -> None:
        self.is_stopped = False
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            # -P: the current folder may hold anything.
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ONE_THREAD | {"PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._reports = self._process.stdout

    def begin(self, job: CompileJob) -> None:
        """Run the job, the only one."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(job))

    def wait(self, stall_seconds: float = STALL_SECONDS) -> int:
        """Wait until the job is done; returns the number of its kernels.

        Raises:
            KernelError: it failed, was stopped, or no kernel was ready for ``stall_seconds``.
        """
        written = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            while selector.select(stall_seconds):
                chunk = os.read(self._reports.fileno(), 1 << 16)
                if not chunk:
                    raise KernelError(f"their compiler ended with code {self._process.wait()}")
                written += chunk
                *_, last, _ = (b"\n" + written).rsplit(b"\n", 2)
                report = msgspec.json.decode(last or b"{}", type=CompileReport)
                if report.error is not None:
                    raise KernelError(report.error)
                if report.done:
                    return report.ready
        raise KernelError(f"their compiler made no progress for {stall_seconds:.0f} s")

    def stop(self) -> None:
        """End the job, wherever it is; ``wait``, in another thread, then fails."""
        self.is_stopped = True
        self._process.kill()

    def close(self) -> None:
        """Stop, and leave nothing behind. Nobody may be waiting."""
        self.stop()
        self._process.wait()
        self._reports.close()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
