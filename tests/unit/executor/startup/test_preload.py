"""What is prepared for a GPU while a server imports modules; its driver only notes calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm.executor.startup.preload import read_weights

#: Appends a line to a file at each call.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static void note(const char *name, int device) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fprintf(file, "%s %d\\n", name, device);
    fclose(file);
}
int cuInit(unsigned flags) { return atoi(getenv("INIT")); }
int cuDeviceGet(int *device, int index) { *device = index; return index < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { note("context", device); return 0; }
"""

#: Stands for torch's libraries.
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void load(void) {
    FILE *file = fopen(getenv("CALLS"), "a");
    fputs("loaded\\n", file);
    fclose(file);
}
"""

PRELOAD = """
import sys, threading
from asyncllm.executor.startup.preload import preload_cuda
preload_cuda(int(sys.argv[1]))
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert "torch" not in sys.modules
"""

#: Prints the extension modules that a server imports after those of EXTENSIONS, without torch.
LATE = """
import sys
from importlib import import_module
import asyncllm.__main__, asyncllm.cli.commands.serve, asyncllm.llm.compile_ahead
from asyncllm.executor.startup.preload import EXTENSIONS
def loaded():
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name for name, file in files.items() if str(file).endswith(".so")}
for name in EXTENSIONS:
    import_module(name)
before = loaded()
assert before
import asyncllm.llm.async_llm, asyncllm.server.reload, asyncllm.server.run
print(*sorted(loaded() - before))
"""


def compile_library(folder: Path, name: str, source: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.c").write_text(source)
    files = str(folder / name), str(folder / "source.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", *files], check=True)


def preloaded(folder: Path, gpu: int, init: int = 0, *, has_driver: bool = True) -> list[str]:
    """What is called for a GPU, sorted."""
    if has_driver:
        compile_library(folder / "driver", "libcuda.so.1", DRIVER)
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder / "driver"),
        "PYTHONPATH": os.pathsep.join((str(folder), *filter(None, sys.path))),
        "CALLS": str(folder / "calls"),
        "INIT": str(init),
    }
    command = [sys.executable, "-c", PRELOAD, str(gpu)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    calls = folder / "calls"
    return sorted(calls.read_text().splitlines()) if calls.exists() else []


@pytest.fixture
def torch_for_gpus(tmp_path: Path) -> Path:
    """A folder with a package of that name and its library."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    compile_library(tmp_path / "torch" / "lib", "libtorch_cuda.so", LIBRARY)
    (tmp_path / "torch" / "__init__.py").write_text("")
    return tmp_path


def test_the_context_is_created_and_the_libraries_are_loaded(torch_for_gpus: Path) -> None:
    assert preloaded(torch_for_gpus, gpu=1) == ["context 1", "loaded"]


def test_a_gpu_that_is_not_there_gets_no_context(torch_for_gpus: Path) -> None:
    assert preloaded(torch_for_gpus, gpu=2) == ["loaded"]


def test_a_driver_that_fails_is_left_alone(torch_for_gpus: Path) -> None:
    assert preloaded(torch_for_gpus, gpu=0, init=100) == []


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_without_a_driver_nothing_happens(torch_for_gpus: Path) -> None:
    assert preloaded(torch_for_gpus, gpu=0, has_driver=False) == []


def test_a_torch_for_cpus_gets_no_context(torch_for_gpus: Path) -> None:
    (torch_for_gpus / "torch" / "lib" / "libtorch_cuda.so").unlink()
    assert preloaded(torch_for_gpus, gpu=0) == []


def test_no_extension_module_waits_for_the_libraries_of_torch() -> None:
    run = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("most", [1 << 30, 150_000])
def test_weights_are_read_up_to_a_limit(most: int, tmp_path: Path) -> None:
    for shard in (1, 2):
        (tmp_path / f"model-0000{shard}-of-00002.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(100_000))  # a second copy
    assert read_weights(tmp_path, most) == min(most, 200_000)


def test_a_single_file_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(100_000))
    assert read_weights(tmp_path) == 5000


def test_nothing_happens_without_weights(tmp_path: Path) -> None:
    assert read_weights(tmp_path) == 0
    assert read_weights(tmp_path / "absent") == 0
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    assert read_weights(tmp_path) == 0
