"""Projections in one order: each row has the same bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import linear as in_torch
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight
from tests.support.kernels.device import DEVICE, GPU, on_hopper

pytest.importorskip("triton")

from asyncllm.kernels.triton.gemm.ordered import choose_few, choose_many, ordered_linear

pytestmark = pytest.mark.usefixtures("products_in_order")

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
#: What may be around a product: norm, bias, activation, residual.
AROUND = [{}, {"norm": True, "act": "silu"}, {"bias": True, "residual": True}]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(HALF)


class Projection:
    """A weight with what is around it, and rows that are the first of any batch."""

    def __init__(self, weight: Weight, size: int, columns: int, rows: int, around: dict[str, Any]):
        self.x, self.weight = draw(rows, columns), weight
        self.bias = draw(size) if around.get("bias") else None
        self.residual = draw(rows, size) if around.get("residual") else None
        norm = Norm(draw(columns), 1e-6) if around.get("norm") else None
        self.options = {"norm": norm, "act": around.get("act")}

    def run(self, start: int, end: int, linear: Any = ordered_linear) -> Tensor:
        residual = None if self.residual is None else self.residual[start:end].clone()
        x = self.x[start:end]
        out: Tensor = linear(x, self.weight, self.bias, residual=residual, **self.options)
        return out

    def check(self, batches: list[tuple[int, int]], tolerance: float) -> None:
        whole = self.run(0, len(self.x))
        expected = self.run(0, len(self.x), in_torch.linear.reference).float()
        assert (whole.float() - expected).norm() < tolerance * expected.norm()
        for start, end in batches:
            assert torch.equal(self.run(start, end), whole[start:end]), (start, end)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("size", "columns"), [(96, 136), (70, 64)])
def test_any_shape_on_any_gpu(size: int, columns: int, around: dict[str, Any]) -> None:
    projection = Projection(draw(size, columns), size, columns, 90, around)
    projection.check([(0, 1), (5, 8), (17, 50), (89, 90)], 1e-2)


@on_hopper
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("size", "columns"), [(1024, 3072), (6144, 1024), (4096, 4096), (19200, 512), (136, 320)]
)
def test_few_rows_and_many(size: int, columns: int, around: dict[str, Any]) -> None:
    size -= size % 16 if around.get("act") else 0
    projection = Projection(draw(size, columns) * 0.02, size, columns, 2600, around)
    ends = [(n - 2, n) for n in (600, 2600)]
    starts = [(0, n) for n in (1, 2, 9, 33, 64, 65, 100, 129, 200, 256, 257, 700)]
    projection.check([*starts, *ends], 1e-2)


@on_hopper
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize(("size", "columns"), [(1024, 3072), (6144, 1024), (19200, 512)])
def test_fp8(size: int, columns: int, blocked: bool, around: dict[str, Any]) -> None:
    data = draw(size, columns).to(torch.float8_e4m3fn)
    shape = (size // 128, columns // 128) if blocked else (size, 1)
    weight = Fp8Matrix(data, torch.rand(shape, device=DEVICE) * 0.02 + 0.01)
    projection = Projection(weight, size, columns, 1100, around)
    projection.check([(0, n) for n in (1, 2, 9, 16, 17, 40, 64, 65, 129, 500)], 5e-2)


@pytest.mark.parametrize("around", AROUND)
def test_int4(around: dict[str, Any]) -> None:
    size, columns = 64, 256
    codes = torch.randint(0, 256, (size, columns // 2), dtype=torch.uint8, device=DEVICE)
    zero = torch.full((2, size), 8, dtype=torch.uint8, device=DEVICE)
    weight = Int4Matrix(codes, torch.rand(2, size, device=DEVICE).half() * 0.1, zero)
    Projection(weight, size, columns, 70, around).check([(0, 1), (3, 20), (60, 70)], 2e-2)


@pytest.mark.skipif(GPU is not None, reason="needs no GPU")
def test_no_tile_cuts_the_columns() -> None:
    for size, columns in ((1024, 2048), (4096, 12288), (151936, 4096), (128, 2880)):
        few = [choose_few(rows, size, columns) for rows in (1, 8, 64)]
        assert all(tile.splits == tile.fold == 1 and not tile.stagger for tile in few)
        many = [choose_many(rows, size, columns) for rows in (65, 256, 8192)]
        assert all(tile.splits == 1 for tile, _ in many)
