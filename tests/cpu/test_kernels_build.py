"""Triton's kernels are compiled without a GPU, and found again by what serving launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncllm import demo
from asyncllm.attention.prebuild import KernelError
from asyncllm.kernels.prebuild import gpus_of
from tests.cpu import tiny_models

pytest.importorskip("triton")

SIZES = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128"]

#: Launches steps on a stand-in for a GPU, where compiling is real and running does nothing.
SERVE = """
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
import torch
from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.executor import rehearsal
from asyncllm.kernels import prebuild
from asyncllm.kernels.watch import CompileWatch
from asyncllm.models.spec import read_spec
from triton import knobs
from triton.runtime import driver

class Gpu(prebuild._AbsentGpu):
    utils = SimpleNamespace(
        load_binary=lambda *args: (0, 0, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    def launcher_cls(self, source, metadata):
        return lambda *args: None

watch = CompileWatch()
watch.install(sys.argv[1])
gpu = prebuild.gpus_of(["9.0a"])[0]
config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
with prebuild.rehearsing(gpu):
    driver._active = Gpu(gpu)
    knobs.runtime.jit_cache_hook = None  # so that launches are carried out
    rehearsal.run_steps(read_spec(Path(demo.path())), torch.bfloat16, config)
print(len(watch.compiled), watch.loaded)
"""


def python(*arguments: str) -> str:
    """What it prints, in a process where kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.timeout(400)  # it compiles some fifty kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of no machine without a GPU")
def test_serving_finds_every_kernel_that_was_built_without_a_gpu(tmp_path: Path) -> None:
    build = ["kernels", "build", "--arch", "9.0a", "--model", str(demo.path()), *SIZES]
    said = python("-m", "asyncllm", *build, "--kernel-cache", str(tmp_path))
    assert "of Triton's kernels in bfloat16 for NVIDIA H200" in said
    compiled, loaded = map(int, python("-c", SERVE, str(tmp_path)).split())
    assert compiled == 0
    assert loaded > 10


def test_architectures_have_a_usual_gpu() -> None:
    assert [gpu.name for gpu in gpus_of(["9.0a", "10.0"])] == ["NVIDIA H200", "NVIDIA B200"]
    with pytest.raises(KernelError, match=r"not for 8\.0"):
        gpus_of(["9.0", "8.0"])


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="name one"):
        gpus_of([])


REHEARSE = """
import sys
from collections.abc import Callable
from pathlib import Path
import torch
from asyncllm.config import EngineConfig
from asyncllm.executor.rehearsal import find_variants
from asyncllm.kernels.prebuild import gpus_of
from asyncllm.models.spec import read_spec

config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
for folder in sys.argv[1:]:
    spec, [gpu] = read_spec(Path(folder)), gpus_of(["9.0a"])
    print(len(find_variants(spec, torch.bfloat16, config, gpu)))
"""


def test_every_family_is_rehearsed(folder_of: Callable[[str], Path]) -> None:
    folders = [str(folder_of(family)) for family in tiny_models.FAMILIES]
    counts = python("-c", REHEARSE, *folders).split()
    assert len(counts) == len(folders)
    assert all(int(count) > 10 for count in counts)
