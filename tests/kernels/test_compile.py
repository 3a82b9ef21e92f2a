"""Every kernel compiles for the GPUs that it is for, on machines that have none."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

import asyncllm.kernels.triton
from tests.support.kernels.launches import LAUNCHES

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="the other tests compile the kernels"),
    pytest.mark.timeout(900),  # each GPU takes half a minute of CPU time
]


#: Launches for any GPU whose PTX no test reads: all of their variants are compiled for Ampere, and
#: each kernel for other GPUs, once for the types of its arguments.
SAMPLED = [
    name
    for name in LAUNCHES
    if not name.endswith("_hopper") and name not in ("decode", "decode_heads")
]


class Compile(Protocol):
    def __call__(
        self, arch: str, known: Iterable[str] = (), sampled: Iterable[str] = ()
    ) -> dict[str, Any]:
        """See ``launches.compile_modules``."""


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """In a process of its own, without Triton's interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.kernels.launches"],
        env=environment,
        cwd=Path(__file__).parents[2],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def compile_them(
            arch: str, known: Iterable[str] = (), sampled: Iterable[str] = ()
        ) -> dict[str, Any]:
            print(json.dumps([arch, list(known), list(sampled)]), file=asks, flush=True)
            kernels: dict[str, Any] = json.loads(answers.readline())
            return kernels

        yield compile_them


@pytest.fixture(scope="module")
def compiled(compile_for: Compile) -> dict[str, Any]:
    """For a Hopper GPU."""
    return compile_for("9.0a", sampled=SAMPLED)


def test_every_module_is_launched(compiled: dict[str, Any]) -> None:
    launched = {name.rpartition(".")[0] for kernels in compiled.values() for name, *_ in kernels}
    package = asyncllm.kernels.triton
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        spec = importlib.util.find_spec(module.name)
        assert spec is not None
        assert spec.origin is not None
        if "gdc_wait" in Path(spec.origin).read_text():
            assert module.name in launched


@pytest.mark.parametrize("module", LAUNCHES)
def test_compiles(module: str, compiled: dict[str, Any]) -> None:
    """For Hopper; each kernel waits for the one before it, which may still read what this one
    writes, and lets the next one start."""
    kernels = compiled[module]
    assert isinstance(kernels, list), kernels
    assert kernels
    for name, _, options, ptx, shared in kernels:
        assert options["launch_pdl"], name
        if ptx is None:  # not part of the sample
            continue
        assert shared <= 227 << 10, name
        write = re.search(r"\b((st|red|atom)\.\S*|cp\.async\.bulk\.tensor\.\dd\.)global\b", ptx)
        assert write, name
        assert 0 < ptx.find("griddepcontrol.wait") < write.start(), name
        assert "griddepcontrol.launch_dependents" in ptx, name


@pytest.fixture(scope="module")
def for_ampere(compile_for: Compile) -> dict[str, Any]:
    return compile_for("8.0")


@pytest.mark.slow
def test_kernels_that_are_not_for_hopper_compile_for_ampere(for_ampere: dict[str, Any]) -> None:
    check_not_for_hopper(for_ampere, "8.0", 163)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "shared_kib"), [("10.0", 227), ("12.0", 99)])
def test_kernels_that_are_not_for_hopper_compile_for_blackwell(
    arch: str, shared_kib: int, compile_for: Compile
) -> None:
    check_not_for_hopper(compile_for(arch, sampled=LAUNCHES), arch, shared_kib)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["8.6", "8.9"])
def test_kernels_for_a_smaller_ampere_gpu_and_for_ada_compile(
    arch: str, for_ampere: dict[str, Any], compile_for: Compile
) -> None:
    """For these, Triton makes the same of a variant as for 8.0; what is launched there alone is
    compiled."""
    known = {
        key: (ptx, shared) for kernels in for_ampere.values() for _, key, _, ptx, shared in kernels
    }
    modules = compile_for(arch, known)
    compiled = 0
    for module, kernels in modules.items():
        assert isinstance(kernels, list), kernels
        if module != "fp8":  # which 8.0 and 8.6 do not have
            compiled += sum(ptx is not None for *_, ptx, _ in kernels)
        modules[module] = [
            (name, key, options, *((ptx, shared) if ptx else _retargeted(arch, *known[key])))
            for name, key, options, ptx, shared in kernels
        ]
    assert 0 < compiled < 10, "tiles for less shared memory"
    check_not_for_hopper(modules, arch, 99)


def _retargeted(arch: str, ptx: str, shared: int) -> tuple[str, int]:
    return ptx.replace(".target sm_80", f".target sm_{arch.replace('.', '')}"), shared


def check_not_for_hopper(modules: dict[str, Any], arch: str, shared_kib: int) -> None:
    """They fit. The instructions that overlap kernels are those of Hopper and newer GPUs."""
    version = float(arch)
    assert ("fp8" in modules) == (version >= 8.9)
    left_out = {name for name in LAUNCHES if name.endswith("_hopper")}
    assert set(LAUNCHES) - set(modules) - {"fp8"} == left_out
    overlaps = version >= 9
    for module, kernels in modules.items():
        assert isinstance(kernels, list), kernels
        assert kernels, module
        for name, _, options, ptx, shared in kernels:
            assert options["launch_pdl"] == overlaps, name
            if ptx is None:  # not part of the sample
                continue
            assert shared <= shared_kib << 10, (name, shared)
            assert ("griddepcontrol" in ptx) == overlaps, name
            assert f".target sm_{arch.replace('.', '')}" in ptx, name


def test_two_programs_of_decode_attention_fit_on_a_multiprocessor(compiled: dict[str, Any]) -> None:
    kernels = compiled["decode_hopper"]
    assert len(kernels) == 9
    for *_, shared in kernels:
        assert 2 * (shared + 1024) <= 228 << 10  # 1 KiB of each is the system's


def test_kernels_that_branch_on_sums_have_the_same_sum_in_every_lane(
    compiled: dict[str, Any],
) -> None:
    """See ``Launcher``."""
    fuses = {name: options["enable_fp_fusion"] for name, _, options, *_ in compiled["sampling"]}
    assert not fuses["asyncllm.kernels.triton.sampling.topk_topp.filter_kernel"]


@pytest.mark.parametrize("module", ["decode", "decode_heads"])
def test_first_tiles_of_decode_attention_are_on_their_way_before_the_wait(
    module: str, compiled: dict[str, Any]
) -> None:
    """What its programs do before the kernels before them have finished."""
    (*_, ptx, _), *overlapping = compiled[module]
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait
    assert before.count("cp.async.commit_group") >= 2  # K and V
    for *_, other, _ in overlapping:
        # Only the extra row waits, and it does nothing else.
        before, *after = other.split("griddepcontrol.wait")
        assert len(after) == 1
        assert "cp.async" not in before
