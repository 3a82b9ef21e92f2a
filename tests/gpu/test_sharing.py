"""Two engines on one GPU: in one process, in two, and in two under MPS.

Each scenario is a program of its own, because a GPU that hangs would take this process with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models.successor import WIDE, make

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu, pytest.mark.timeout(400)]

#: Most seconds of a program; the kernels may have to be compiled first.
SECONDS = 180


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("successor") / "model", WIDE, "cuda")


def command(mode: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.support.gpu.sharing", mode, str(folder), "cuda"]


def run(mode: str, folder: Path, env: dict[str, str] | None = None) -> str:
    """What the program prints; ``subprocess`` kills it if it takes too long."""
    process = subprocess.run(
        command(mode, folder),
        env=os.environ | (env or {}),
        timeout=SECONDS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return process.stdout


def run_beside(folder: Path, env: dict[str, str]) -> list[str]:
    """Run ``once`` twice beside ``serve``; returns what it prints."""
    with subprocess.Popen(
        command("serve", folder),
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as loaded:
        try:
            assert loaded.stdout is not None
            assert loaded.stdout.readline() == "ready\n"
            printed = [run("once", folder, env) for _ in range(2)]
            assert loaded.poll() is None
            rest, _ = loaded.communicate(timeout=SECONDS)
        finally:
            loaded.kill()
    assert loaded.returncode == 0
    assert int(rest.split()[0]) >= 48
    return printed


def test_two_engines_in_one_process(folder: Path) -> None:
    assert run("beside", folder).count("waiting:") == 3


def test_two_processes(folder: Path) -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert run_beside(folder, {}) == [f"waiting: {count}\n"] * 2


def test_two_processes_with_half_of_the_gpu_under_mps(folder: Path, mps: dict[str, str]) -> None:
    env = mps | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert run_beside(folder, env) == ["waiting: 1\n"] * 2


def test_two_processes_under_mps(folder: Path, mps: dict[str, str]) -> None:
    assert run_beside(folder, mps) == ["waiting: 1\n"] * 2


@pytest.fixture
def mps() -> Iterator[dict[str, str]]:
    """The environment of clients of an MPS daemon of our own."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("nvidia-cuda-mps-control is not installed")
    # Names of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as short:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{short}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{short}/log"}
        for path in env.values():
            Path(path).mkdir()
        started = subprocess.run(
            [control, "-d"], env=os.environ | env, capture_output=True, text=True, timeout=60
        )
        if started.returncode != 0:
            pytest.skip(f"MPS does not start: {started.stdout}{started.stderr}")
        try:
            client = "import torch; print(int(torch.ones(1, device='cuda')))"
            probe = subprocess.run(
                [sys.executable, "-c", client],
                env=os.environ | env,
                capture_output=True,
                text=True,
                timeout=60,
            )
            if probe.stdout != "1\n":
                pytest.skip(f"MPS takes no clients: {probe.stderr.strip().splitlines()[-1:]}")
            yield env
        finally:
            subprocess.run([control], input="quit\n", env=os.environ | env, text=True, timeout=60)
