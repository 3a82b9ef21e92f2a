"""What a plain ``pip install`` without a GPU leaves out is imported only where it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Packages of extras, and Triton, which comes with PyTorch for CUDA alone.
MISSING = ("flashinfer", "opentelemetry", "ray", "triton", "zmq")

#: Modules that need one of them. Whoever imports these knows that it is there.
NEED_THEM = {
    "asyncllm.engine.kv_events",
    "asyncllm.parallel.push",
    "asyncllm.server.observe.spans",
    "asyncllm.executor.startup.recorded_ranks",
}
PACKAGES_THAT_NEED_THEM = ("asyncllm.kernels.triton", "asyncllm.ray")

BLOCK = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"
IMPORT_ALL = f"""
import importlib, pkgutil, asyncllm
for module in pkgutil.walk_packages(asyncllm.__path__, "asyncllm.", onerror=lambda name: None):
    if not module.name.startswith({PACKAGES_THAT_NEED_THEM}):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, error, file=sys.stderr)
            print(module.name)
"""
DOCTOR = """
from asyncllm.__main__ import main
sys.exit(main(["doctor", "--gpu", "h200"]))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_no_other_module_needs_them() -> None:
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == NEED_THEM, done.stderr


@pytest.mark.slow
def test_the_doctor_does_without_them() -> None:
    """It is for machines without a GPU."""
    done = run(DOCTOR)
    assert done.returncode == 0, done.stderr
    assert "left for the KV cache" in done.stdout
