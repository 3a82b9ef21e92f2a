"""Steps of any number of tokens launch what is compiled ahead for the sizes that steps are padded
to, and for the largest step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.executor.startup.triton_prebuild import recorded_launches
from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.types import Fp8Matrix, GatedExperts, Mxfp4Matrix, Routing
from tests.support.kernels.device import DEVICE

PADDED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192)
OTHERS = (5121, 5555, 6002, 7004, 8191)


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def fp8(rows: int, columns: int) -> Fp8Matrix:
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    return Fp8Matrix(data, torch.empty(rows // 128, columns // 128))


def mxfp4(rows: int, columns: int) -> Mxfp4Matrix:
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.empty(rows, columns // 32, dtype=torch.uint8))


def experts(count: int, inner: int, hidden: int) -> Iterator[GatedExperts]:
    yield GatedExperts(count, half(count, 2 * inner, hidden), half(count, hidden, inner))
    yield GatedExperts(count, fp8(count * 2 * inner, hidden), fp8(count * hidden, inner))
    weights = mxfp4(count * 2 * inner, hidden), mxfp4(count * hidden, inner)
    biases = half(count, 2 * inner), half(count, hidden)
    yield GatedExperts(count, *weights, *biases, "clamped", True, 1.7, 7.0)


def missing() -> list[list[str]]:
    """For each format: kernels that other numbers of tokens launch in variants of their own."""
    found = []
    gpu = Gpu((9, 0), "NVIDIA H200", 132)
    with recorded_launches(gpu) as variants, torch.device("meta"):
        for each in experts(16, 256, 512):
            mix(each, PADDED)
            known = len(variants)
            mix(each, OTHERS)
            found.append([variant.function.__name__ for variant in variants[known:]])
    return found


def mix(experts: GatedExperts, tokens: Iterable[int]) -> None:
    from asyncllm.kernels.triton.experts.mixing import mix_experts
    from asyncllm.kernels.triton.experts.routing import choose_experts

    for count in tokens:
        choice = choose_experts(half(count, 16), Routing(8, "softmax", True), torch.bfloat16)
        mix_experts(half(count, 512), *choice, experts, half(count, 512))


@pytest.mark.skipif(DEVICE != "cpu", reason="launches are recorded where there is no GPU")
def test_no_number_of_tokens_needs_a_variant_of_its_own() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    process = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert json.loads(process.stdout) == [[], [], []]


if __name__ == "__main__":
    print(json.dumps(missing()))
