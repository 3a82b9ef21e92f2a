"""``asyncllm doctor`` without a GPU: what this machine's CPU can do."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.lab.planning import cpu
from asyncllm.lab.planning.cpu import (
    CpuMachine,
    CpuSpeed,
    largest,
    plan_model,
    plan_size,
    this_machine,
)
from asyncllm.models.spec import read_spec
from tests.support.models.configs import QWEN3_8B, config_folder

GIB = 2**30
MACHINE = CpuMachine(
    cores=8,
    threads=8,
    vectors="AVX512",
    memory=32 * GIB,
    free=24 * GIB,
    speeds={"float32": CpuSpeed(40e9, 400e9), "bfloat16": CpuSpeed(32e9, 1600e9)},
)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.kernels.cuda_driver.count_gpus", lambda: 0)
    monkeypatch.setattr(cpu, "this_machine", lambda _: MACHINE)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(config_folder(tmp_path, QWEN3_8B))


def test_what_a_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    shown = " ".join(printed.out.split())
    for words in (
        "no GPU, 8 cores (AVX512, 8 threads) and 32.0 GiB of memory, 24.0 of them free",
        "billions of parameters that fit 5.9 11.8",
        "asyncllm-demo: float32 bfloat16",
        "fits yes yes",
        "8.0 29.8 - - 14.9 2.0 100",
        "--gpu plans for GPUs: h200, h100,",
    ):
        assert words in shown


def test_a_model_that_fits_in_half_the_bytes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", model, "--json"]) == 0
    printed = capsys.readouterr()
    assert "in float32: it takes 36.5" in printed.err
    assert len(printed.err.splitlines()) == 1
    found = json.loads(printed.out)
    assert found["cpu"]["machine"]["memory"] == 32 * GIB
    plans = found["cpu"]["plans"]
    assert plans["float32"]["problem"]
    plan = plans["bfloat16"]
    assert plan["problem"] is None
    assert plan["weights"] == pytest.approx(16.38e9, rel=0.01)
    assert plan["kv_bytes_per_token"] == 147_456
    # All weights are read for a token, but for the table of embeddings.
    assert plan["decode_rate"] == pytest.approx(32e9 / 15.14e9, rel=0.01)


def test_a_model_that_does_not_fit_at_all(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = msgspec.structs.replace(MACHINE, free=8 * GIB)
    monkeypatch.setattr(cpu, "this_machine", lambda _: small)
    assert main(["doctor", model]) == 1
    printed = capsys.readouterr()
    assert "fits no no" in " ".join(printed.out.split())
    assert len(printed.err.splitlines()) == 2


def test_what_is_for_gpus_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--load", "c32"])
    assert "--load, --tp and --dp plan for GPUs" in capsys.readouterr().err


def test_sizes_are_bounded_by_memory() -> None:
    for dtype in ("float32", "bfloat16"):
        most = largest(MACHINE, dtype) / 1e9
        assert plan_size(0.99 * most, MACHINE, dtype).problem is None
        assert plan_size(1.01 * most, MACHINE, dtype).problem is not None


def test_a_measurement_and_a_plan(tmp_path: Path) -> None:
    machine = this_machine(EngineConfig(), seconds=0.0)
    assert 1 <= machine.cores <= machine.threads * 1024
    assert 0 < machine.free <= machine.memory
    spec = read_spec(config_folder(tmp_path, QWEN3_8B))
    for dtype, speed in machine.speeds.items():
        assert speed.bandwidth > 1e7
        assert speed.flops > 1e8
        assert plan_model(EngineConfig(), spec, machine, dtype).decode_rate > 0
