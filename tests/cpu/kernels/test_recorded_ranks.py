"""The kernels by which ranks push tensors to each other are found ahead of time."""

from __future__ import annotations

from tests.cpu.kernels.test_kernels_build import python

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
"""


def test_each_rank_has_kernels_of_its_own() -> None:
    # A sum with a residual and one without, of the embeddings; scores are gathered.
    assert python("-c", PROGRAM).splitlines() == ["4 0 2", "8 8 4"]
