"""The process that compiles kernels: waiting, failing, and never staying behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import KernelError
from asyncllm.executor.startup import kernel_compiler
from asyncllm.executor.startup.compile_job import CompileJob
from asyncllm.executor.startup.kernel_compiler import KernelCompiler, expects_job, job_of
from asyncllm.kernels.gpu import Gpu

FAKE = "tests.support.startup.fake_compiler"
GPU = Gpu((9, 0), "NVIDIA H200", 132)


@contextmanager
def compiler(behaviour: str) -> Iterator[KernelCompiler]:
    job = CompileJob(
        config=EngineConfig(), folder="", dtype=behaviour, gpu=GPU, cache="/nowhere", key="0"
    )
    with closing(KernelCompiler(FAKE)) as started:
        started.begin(job)
        yield started


def gone(pids: list[int], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(runs, pids)):
            return True
        time.sleep(0.05)
    return False


def children() -> set[int]:
    """All processes below this one; other tests may have left some, such as resource trackers."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def started_processes(others: Collection[int] = ()) -> list[int]:
    """The compiler and its own child, once both are there, besides others."""
    pids: set[int] = set()
    while len(pids) < 2:
        time.sleep(0.05)
        pids = children() - set(others)
    return list(pids)


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_waiting_ends_when_all_are_ready() -> None:
    with compiler("works") as started:
        assert started.wait() == 5


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fails", "no compiler here"),
        ("dies", "ended with code 3"),
        ("hangs", "made no progress for 1 s"),
    ],
)
def test_waiting_ends_whatever_happens(behaviour: str, message: str) -> None:
    with compiler(behaviour) as started, pytest.raises(KernelError, match=message):
        started.wait(1.0 if behaviour == "hangs" else 60.0)


def test_stopping_ends_waiting() -> None:
    with compiler("hangs") as started:
        threading.Timer(0.5, started.stop).start()
        with pytest.raises(KernelError):
            started.wait()
        assert started.is_stopped


def test_closing_leaves_no_process() -> None:
    others = children()
    with compiler("hangs"):
        pids = started_processes(others)
    assert gone(pids)


def test_closing_without_a_job_leaves_no_process() -> None:
    others = children()
    with closing(KernelCompiler(FAKE)):
        pids = children() - others
        assert pids
    assert gone(list(pids))


def test_a_module_that_cannot_run_is_reported() -> None:
    job = CompileJob(config=EngineConfig(), folder="", dtype="", gpu=GPU, cache="", key="")
    with closing(KernelCompiler("asyncllm.no_such_module")) as started:
        started.begin(job)
        with pytest.raises(KernelError, match="ended with code 1"):
            started.wait()


#: Starts a compiler that hangs, and prints the ids of its processes.
PARENT = """
import time
from tests.unit.executor.startup.test_kernel_compiler import compiler, started_processes
with compiler("hangs"):
    print(*started_processes(), flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(runs, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(pids)


def test_there_is_no_job_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_compiler, "find_gpu", lambda index: None)
    (tmp_path / "config.json").write_text("{}")
    assert job_of(EngineConfig(device="cuda"), tmp_path) is None


def test_there_is_a_job_until_it_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_compiler, "find_gpu", lambda index: GPU)
    monkeypatch.setattr(kernel_compiler, "find_spec", lambda name: object())
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(device="cuda:1", kernel_cache=str(tmp_path / "cache"))
    assert job_of(EngineConfig(device="cpu"), tmp_path) is None
    assert job_of(config, tmp_path / "missing") is None
    monkeypatch.setattr(kernel_compiler, "is_installed", lambda: True)
    assert not expects_job(EngineConfig(device="cpu"), tmp_path)
    assert not expects_job(config, tmp_path / "missing")
    assert expects_job(config, tmp_path)
    job = job_of(config, tmp_path)
    assert job is not None
    job.record([])
    assert not expects_job(config, tmp_path)
    assert job_of(config, tmp_path) is None
