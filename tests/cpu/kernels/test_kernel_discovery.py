"""The order in which kernels are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import tiny_models

FIRST_FOUND = """
import os, sys
from pathlib import Path
import torch
from asyncllm.config import EngineConfig
from asyncllm.models.spec import read_spec
from asyncllm.executor.startup.kernel_discovery import find_variants
from asyncllm.executor.startup.triton_prebuild import gpus_of

def found(variant):
    if ".attention.prefill" in variant.function.__module__:
        print("sympy" in sys.modules, flush=True)
        os._exit(0)

[gpu] = gpus_of(["9.0a"])
find_variants(read_spec(Path(sys.argv[1])), torch.bfloat16, EngineConfig(), gpu, found)
"""


@pytest.mark.slow
def test_the_slowest_kernel_is_found_before_torch_imports_more(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_FOUND, folder],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "False\n"
