"""Kernels that are compiled while a model loads: what goes wrong there stops no server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.startup.compile_job import CompileJob
from asyncllm.executor.startup.kernel_compiler import KernelCompiler
from asyncllm.kernels.gpu import Gpu
from asyncllm.llm import compile_ahead
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.llm.compile_ahead import CompileAhead

FAKE = "tests.support.startup.fake_compiler"


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CompileAhead]:
    """Starts a compiler of that behaviour."""

    def start(behaviour: str) -> CompileAhead:
        job = CompileJob(
            config=EngineConfig(),
            folder="",
            dtype=behaviour,
            gpu=Gpu((9, 0), "NVIDIA H200", 132),
            cache="",
            key="",
        )
        monkeypatch.setattr(compile_ahead, "job_of", lambda config, folder: job)
        monkeypatch.setattr(compile_ahead, "KernelCompiler", lambda: KernelCompiler(FAKE))
        return CompileAhead(EngineConfig(), Path())

    return start


async def test_waiting_for_kernels(
    does: Callable[[str], CompileAhead], caplog: pytest.LogCaptureFixture
) -> None:
    kernels = does("works")
    await asyncio.to_thread(kernels.wait)
    kernels.close()
    assert not caplog.records


@pytest.mark.parametrize("behaviour", ["fails", "dies"])
async def test_a_failure_is_one_line_of_the_log(
    behaviour: str, does: Callable[[str], CompileAhead], caplog: pytest.LogCaptureFixture
) -> None:
    kernels = does(behaviour)
    await asyncio.to_thread(kernels.wait)
    kernels.close()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "compiled at their first launch" in record.getMessage()


async def test_stopping_ends_waiting(does: Callable[[str], CompileAhead]) -> None:
    before = set(psutil.Process().children())
    kernels = does("hangs")
    waiting = asyncio.ensure_future(asyncio.to_thread(kernels.wait))
    await asyncio.sleep(0.5)
    kernels.stop()
    with pytest.raises(EngineDead):
        await waiting
    kernels.close()
    assert set(psutil.Process().children()) <= before


async def test_stopping_before_the_start(does: Callable[[str], CompileAhead]) -> None:
    before = set(psutil.Process().children())
    kernels = does("hangs")
    kernels.stop()
    with pytest.raises(EngineDead):
        await asyncio.to_thread(kernels.wait)
    kernels.close()
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers start before it is known whether there is a job."""
    monkeypatch.setattr(compile_ahead, "expects_job", lambda config, folder: True)


@pytest.mark.usefixtures("early")
async def test_a_compiler_that_started_early_does_the_job(
    does: Callable[[str], CompileAhead], caplog: pytest.LogCaptureFixture
) -> None:
    before = set(psutil.Process().children())
    kernels = does("works")
    await asyncio.to_thread(kernels.wait)
    assert len(set(psutil.Process().children()) - before) <= 1
    kernels.close()
    assert not caplog.records


@pytest.mark.usefixtures("early")
async def test_a_compiler_that_started_early_is_closed_without_a_job(
    does: Callable[[str], CompileAhead], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(psutil.Process().children())
    does("works").close()  # replaces what compiles
    monkeypatch.setattr(compile_ahead, "job_of", lambda config, folder: None)
    kernels = CompileAhead(EngineConfig(), Path())
    await asyncio.to_thread(kernels.wait)
    kernels.close()
    async with asyncio.timeout(20):  # the first one's thread may only be starting it
        while not set(psutil.Process().children()) <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_cpu_has_no_kernels_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "job_of", lambda config, folder: 1 / 0)
    kernels = CompileAhead(EngineConfig(device="cpu"), Path())
    await asyncio.to_thread(kernels.wait)
    kernels.close()


async def test_a_process_that_cannot_start_stops_no_server(
    does: Callable[[str], CompileAhead],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    kernels = does("works")
    await asyncio.to_thread(kernels.wait)
    kernels.close()
    assert "/no/such/python" in caplog.text


async def test_a_job_that_cannot_be_found_out_stops_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: EngineConfig, folder: Path) -> CompileJob | None:
        raise ValueError("triton.__spec__ is None")

    monkeypatch.setattr(compile_ahead, "job_of", broken)
    kernels = CompileAhead(EngineConfig(), Path())
    await asyncio.to_thread(kernels.wait)
    kernels.close()
    assert "triton.__spec__ is None" in caplog.text


async def test_kernels_that_were_begun_before_are_closed_with_loading(
    does: Callable[[str], CompileAhead],
) -> None:
    before = set(psutil.Process().children())
    kernels = does("hangs")
    async with AsyncLLM(device="sim", sim_profile="h200-0.6b", kernels=kernels):
        assert set(psutil.Process().children()) <= before


async def test_kernels_that_were_begun_before_are_closed_if_loading_fails(
    does: Callable[[str], CompileAhead],
) -> None:
    before = set(psutil.Process().children())
    kernels = does("hangs")
    with pytest.raises(ModelError):
        await AsyncLLM("/no/such/folder", kernels=kernels).start()
    assert set(psutil.Process().children()) <= before
