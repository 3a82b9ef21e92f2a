"""Triton's kernels are compiled without a GPU, and found again by what serving launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.errors import KernelError
from asyncllm.executor.startup.compile_job import CompileJob
from asyncllm.executor.startup.triton_prebuild import gpus_of
from asyncllm.kernels.gpu import Gpu
from tests.support.models import tiny_models

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
from asyncllm.executor.startup import kernel_discovery
from asyncllm.executor.startup import triton_prebuild as prebuild
from asyncllm.executor.compile_watch import CompileWatch
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
with prebuild.recorded_launches(gpu):
    driver._active = Gpu(gpu)
    knobs.runtime.jit_cache_hook = None  # so that launches are carried out
    kernel_discovery.run_steps(read_spec(Path(demo.path())), torch.bfloat16, config)
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
        cwd=Path(__file__).parents[3],
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.timeout(400)  # it compiles some seventy kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of no machine without a GPU")
def test_serving_finds_every_kernel_that_was_built_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # part of the job's key
    # Not for the GPU that serves alone, and for that one last: it has kernels and tiles of its own.
    archs = ["--arch", "8.0", "--arch", "9.0a"]
    build = ["kernels", "build", *archs, "--model", str(demo.path()), *SIZES]
    said = python("-m", "asyncllm", *build, "--kernel-cache", str(tmp_path))
    first, second = said.splitlines()
    assert "of Triton's kernels in bfloat16 for NVIDIA A100-SXM4-80GB" in first
    assert "of Triton's kernels in bfloat16 for NVIDIA H200" in second
    compiled, loaded = map(int, python("-c", SERVE, str(tmp_path)).split())
    assert compiled == 0
    assert loaded > 10
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, kernel_cache=str(tmp_path)
    )
    h200 = Gpu((9, 0), "NVIDIA H200", 132)
    assert CompileJob.of(config, Path(demo.path()), h200).is_done()
    assert len(list((tmp_path / "asyncllm").iterdir())) == 2


#: Hashes all functions of all kernels in a random order, and prints a hash of the hashes.
KEYS = """
import hashlib
import pkgutil
import random
import sys
from importlib import import_module
from asyncllm.kernels import triton
from asyncllm.kernels.triton.launch import hash_callees

random.seed(int(sys.argv[1]))
names = [module.name for module in pkgutil.walk_packages(triton.__path__, f"{triton.__name__}.")]
random.shuffle(names)
functions = {
    f"{name}.{key}": value
    for name in names
    for key, value in vars(import_module(name)).items()
    if hasattr(type(value), "cache_key") and value.fn.__module__ == name
}
shuffled = list(functions)
random.shuffle(shuffled)
for key in shuffled:
    hash_callees(functions[key])
keys = [(key, functions[key].cache_key) for key in sorted(functions)]
print(len(keys), hashlib.sha256(repr(keys).encode()).hexdigest())
"""


def test_keys_do_not_depend_on_what_was_launched_before() -> None:
    first, second = (python("-c", KEYS, seed) for seed in "12")
    assert first == second
    assert int(first.split()[0]) > 100


def test_architectures_have_a_usual_gpu() -> None:
    assert [gpu.name for gpu in gpus_of(["9.0a", "10.0"])] == ["NVIDIA H200", "NVIDIA B200"]
    assert [gpu.capability for gpu in gpus_of(["8.0", "8.6", "8.9"])] == [(8, 0), (8, 6), (8, 9)]
    with pytest.raises(KernelError, match=r"not for 7\.5"):
        gpus_of(["9.0", "7.5"])


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="name one"):
        gpus_of([])


#: After kernel discovery, runs eager steps of many sizes, for each [folder, rows, ranks]. Prints
#: how many kernels were discovered, and the names of further kernels that the steps launch.
SWEEP = """
import itertools
import json
import sys
from pathlib import Path
import numpy as np
import torch
from asyncllm.config import EngineConfig
from asyncllm.executor.startup import kernel_discovery
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.startup.triton_prebuild import gpus_of, recorded_launches
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import RowParams

length, tokens = 5000, 8192
draws = ({"temperature": 0.0}, {}, {"top_k": 50})
changes = ({}, {"presence_penalty": 0.5, "logprobs": 5}, {"min_length": length})
params = itertools.cycle(
    RowParams(stop_ids=(0,), **draw, **change) for draw in draws for change in changes
)
# Rows whose scores change are sampled 32 at a time: slots of each kind for two groups.
mixed_slots = 100
[gpu] = gpus_of([sys.argv[1]])

# Rows of one token and prompts: each number of either, with few and many of the others.
def steps(max_rows):
    decodes = (0, *range(1, 10), *range(15, max_rows, max_rows // 25))
    prompts = (0, 1, 2, 30, 100, 600)
    pairs = {*itertools.product(decodes, (0, 1, 30)), *itertools.product((0, 1, 9, 64), prompts)}
    return [pair for pair in sorted(pairs) if 0 < sum(pair) <= max_rows]

def sweep(folder, max_rows, tp):
    config = EngineConfig(
        max_num_seqs=max_rows, max_num_batched_tokens=tokens, max_model_len=length, tp=tp
    )
    eager = kernel_discovery.run_steps(read_spec(Path(folder)), torch.bfloat16, config)
    yield
    eager.table.num_known[:] = 0
    for slot in range(mixed_slots, max_rows):
        eager.sampler.admit(slot, RowParams(top_k=50, stop_ids=(0,)), np.zeros(1, np.int32), 1)
    for count, prompts in steps(max_rows):
        q_len = min(max((tokens - count) // max(prompts, 1), 2), length - 1)
        q_lens = [1] * count + [q_len - i % 2 for i in range(prompts)]
        rows = [(slot, min(slot, length - n), n) for slot, n in enumerate(q_lens)]
        for slot in range(min(len(rows), mixed_slots)):
            eager.sampler.admit(slot, next(params), np.zeros(1, np.int32), 1)
        eager(StepRows.of(np.array(rows, dtype=np.int32), eager.table))

for case in json.loads(sys.argv[2]):
    with recorded_launches(gpu) as variants:
        swept = sweep(*case)
        next(swept)
        discovered = len(variants)
        assert next(swept, "done") == "done"
    print(discovered, *(variant.function.__name__ for variant in variants[discovered:]))
"""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


SHAPES = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "few heads": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}


CASES = {
    "9.0a": [
        ("Qwen3-0.6B", 200, 1),
        ("Qwen3-0.6B", 200, 2),
        ("few heads", 200, 1),
        ("few heads", 1500, 1),
    ],
    "8.0": [("Qwen3-0.6B", 200, 1)],
}


@pytest.mark.parametrize("arch", CASES)
def test_no_step_launches_a_kernel_that_was_not_discovered(arch: str, tmp_path: Path) -> None:
    for shape, sizes in SHAPES.items():
        (tmp_path / shape).mkdir()
        (tmp_path / shape / "config.json").write_text(json.dumps(QWEN3 | sizes))
    cases = [(str(tmp_path / shape), *numbers) for shape, *numbers in CASES[arch]]
    lines = python("-c", SWEEP, arch, json.dumps(cases)).splitlines()
    for case, line in zip(cases, lines, strict=True):
        discovered, *others = line.split()
        assert int(discovered) > 30, case
        assert not others, case


DISCOVER = """
import sys
from pathlib import Path
import torch
from asyncllm.config import EngineConfig
from asyncllm.executor.startup.kernel_discovery import find_variants
from asyncllm.executor.startup.triton_prebuild import gpus_of
from asyncllm.models.spec import read_spec

config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
for folder in sys.argv[1:]:
    spec, [gpu] = read_spec(Path(folder)), gpus_of(["9.0a"])
    print(len(find_variants(spec, torch.bfloat16, config, gpu)))
"""


def test_kernels_of_every_family_are_discovered(folder_of: Callable[[str], Path]) -> None:
    folders = [str(folder_of(family)) for family in tiny_models.REPRESENTATIVE]
    counts = python("-c", DISCOVER, *folders).split()
    assert len(counts) == len(folders)
    assert all(int(count) > 10 for count in counts)


FOR_FLASHINFER = """
import sys
from pathlib import Path
import torch
from asyncllm.config import EngineConfig
from asyncllm.executor.startup.kernel_discovery import find_variants
from asyncllm.executor.startup.triton_prebuild import gpus_of
from asyncllm.models.spec import read_spec

arch, folders, attentions = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
[gpu] = gpus_of([arch])
for folder in folders:
    for attention in attentions:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
        config = EngineConfig(attention=attention, **sizes)
        found = find_variants(read_spec(Path(folder)), torch.bfloat16, config, gpu)
        print(*{variant.function.__name__ for variant in found})
"""


@pytest.mark.parametrize(
    ("arch", "needed"), [("9.0a", {"flashinfer": True, "auto": False}), ("8.0", {"auto": True})]
)
def test_our_kernels_that_flashinfer_needs_are_discovered(
    arch: str, needed: dict[str, bool], folder_of: Callable[[str], Path]
) -> None:
    folders = {str(demo.path()): False, str(folder_of("gpt_oss")): True}
    lines = python("-c", FOR_FLASHINFER, arch, ",".join(folders), *needed).splitlines()
    cases = [(sinks, needs) for sinks in folders.values() for needs in needed.values()]
    for (has_sinks, needs), line in zip(cases, lines, strict=True):
        assert "_encode_heads" in line.split()
        assert ("_list_pages" in line.split()) == needs
        assert ("_apply_sinks" in line.split()) == (has_sinks and needs)
