"""Which models' kernels are found by running two layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec
from asyncllm.startup.kernel_discovery import shortened
from tests.support.models import tiny_models


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", 2),
        ("ministral3", 2),
        ("smollm3", 4),  # one layer has no positions
        ("olmo3", 4),  # windows
        ("glm4_moe", 3),  # a layer without experts
    ],
)
def test_layers_that_are_alike_run_once(family: str, layers: int, tmp_path: Path) -> None:
    spec = read_spec(tiny_models.make(family, tmp_path))
    model = make_model(spec, torch.bfloat16, torch.device("meta"))
    assert shortened(spec, model).num_layers == layers


FIRST_FOUND = """
import os, sys
from pathlib import Path
import torch
from asyncllm.config import EngineConfig
from asyncllm.models.spec import read_spec
from asyncllm.startup.kernel_discovery import find_variants
from asyncllm.startup.triton_prebuild import gpus_of

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
