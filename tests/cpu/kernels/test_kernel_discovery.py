"""The order in which kernels are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.kernels.test_kernels_build import python
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


PROGRAM = """
from collections import Counter
from pathlib import Path
import torch
from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.executor.startup.kernel_discovery import find_variants
from asyncllm.executor.startup.triton_prebuild import gpus_of
from asyncllm.models.spec import read_spec

[gpu] = gpus_of(["9.0a"])
for tp, tokens in (2, 64), (4, 2048):
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=tokens, max_model_len=128, tp=tp)
    found = find_variants(read_spec(Path(demo.path())), torch.bfloat16, config, gpu)
    names = Counter(variant.function.__name__ for variant in found)
    print(names["_one_shot"], names["_two_shots"], names["_gather"])
sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
config = EngineConfig(**sizes, deterministic=True)
found = find_variants(read_spec(Path(demo.path())), torch.bfloat16, config, gpu)
names = {variant.function.__name__ for variant in found}
print(sorted(names & {"_decode", "_prefill", "_attend_pieces", "_attend_rows", "_gemv"}))
"""


def test_each_rank_has_kernels_of_its_own_and_so_has_the_deterministic_mode() -> None:
    # A sum with a residual and one without, of the embeddings; scores are gathered.
    *of_ranks, ordered = python("-c", PROGRAM).splitlines()
    assert of_ranks == ["4 0 2", "8 8 4"]
    assert ordered == "['_attend_pieces', '_attend_rows']"
