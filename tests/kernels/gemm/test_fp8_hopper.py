"""Projections with 8-bit weights on Hopper GPUs, against float32 products of the rounded rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels.quantized import dequantize_fp8
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.gemm.fp8_tiles import fp8_tiles
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.tuning import Fp8Tile, choose_fp8_tile, fp8_tile
from asyncllm.kernels.types import Fp8Matrix
from tests.support.kernels.device import DEVICE, on_hopper


class Case(NamedTuple):
    rows: int
    size: int
    columns: int
    tile: Fp8Tile
    blocked: bool = True
    act: str | None = None
    residual: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = [
    Case(70, 384, 512, Fp8Tile(64, 1, 2, 2), residual=True, bias=True),
    Case(70, 448, 1536, Fp8Tile(64, 2, 2, 3), residual=True, bias=True),
    Case(300, 768, 1024, Fp8Tile(128, 1, 1, 4), act="silu"),
    Case(301, 768, 2048, Fp8Tile(128, 2, 1, 5), act="silu", bias=True),
    Case(131, 1000, 2048, Fp8Tile(128, 2, 2, 4), blocked=False, residual=True),
    Case(20, 896, 512, Fp8Tile(32, 3, 1, 4), bias=True, dtype=torch.float16),
    Case(3, 640, 1536, Fp8Tile(8, 3, 4, 3), act="gelu", bias=True),
    Case(33, 208, 400, Fp8Tile(64, 1, 2, 2), blocked=False, residual=True),
    Case(60, 192, 272, Fp8Tile(64, 3, 1, 2), blocked=False, act="silu", bias=True),
    Case(100, 768, 1024, Fp8Tile(64, 3, 1, 3), act="silu"),
    Case(128, 1040, 1040, Fp8Tile(128, 1, 1, 3), blocked=False, bias=True),
]


def random_matrix(size: int, columns: int, *, blocked: bool) -> Fp8Matrix:
    data = (torch.randn(size, columns, device=DEVICE) * 60).to(torch.float8_e4m3fn)
    shape = (-(-size // 128), -(-columns // 128)) if blocked else (size, 1)
    return Fp8Matrix(data, (torch.rand(shape, device=DEVICE) + 0.5) / 4000)


def rounded(x: Tensor, *, blocked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in 8 bits, their scales as kernels take them, and the rows that these are."""
    data, scale = quantize_rows(x, blocked=blocked)
    width = x.shape[1] // scale.shape[1]
    return data, scale.t(), (data.float() * scale.repeat_interleave(width, 1))[: len(x)]


def assert_same(got: Tensor, expected: Tensor) -> None:
    """But for the rounding of the output."""
    assert ((got.float() - expected).norm() / expected.norm()) < 0.006


@on_hopper
@pytest.mark.parametrize("case", CASES)
def test_products(case: Case) -> None:
    x = torch.randn(case.rows, case.columns, device=DEVICE).to(case.dtype)
    weight = random_matrix(case.size, case.columns, blocked=case.blocked)
    bias = torch.randn(case.size, device=DEVICE).to(case.dtype) if case.bias else None
    old = torch.randn(case.rows, case.size, device=DEVICE).to(case.dtype)
    data, scale, values = rounded(x, blocked=case.blocked)
    expected = values @ dequantize_fp8(weight).t()
    if bias is not None:
        expected += bias.float()
    if case.act is not None:
        gate, up = expected.chunk(2, 1)
        expected = (F.silu(gate) if case.act == "silu" else F.gelu(gate)) * up
    residual = None
    if case.residual:
        residual, expected = old.clone(), expected + old.float()
    p = Projection(x, weight, bias, residual=residual, act=case.act)
    got = fp8_tiles(case.tile, p, data, scale)
    assert got.dtype == case.dtype
    assert_same(got, expected)


@on_hopper
def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    """Whatever the tiles, as long as columns are split alike."""
    x = torch.randn(256, 1024, device=DEVICE).to(torch.bfloat16)
    weight = random_matrix(512, 1024, blocked=True)
    outputs = []
    for rows, tile in (
        (1, Fp8Tile(8, 1, 2, 4)),
        (30, Fp8Tile(32, 3, 2, 3)),
        (128, Fp8Tile(64, 1, 2, 4)),
        (250, Fp8Tile(128, 2, 2, 2)),
    ):
        data, scale, _ = rounded(x[:rows], blocked=True)
        outputs.append(fp8_tiles(tile, Projection(x[:rows], weight), data, scale)[0])
    assert all(output.equal(outputs[0]) for output in outputs)


SHAPES = [
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (5120, 2048), (2048, 4096)),
    *((4096, 1024), (1024, 3072), (34816, 5120), (5120, 17408), (1536, 640), (208, 400)),
]


@pytest.mark.parametrize(("size", "columns"), SHAPES)
def test_tiles(size: int, columns: int) -> None:
    """They fit, and columns are divided in the same way for all rows."""
    blocks = -(-columns // 128)
    splits = set()
    for rows in range(1, 300):
        tile = fp8_tile(rows, size, columns)
        assert choose_fp8_tile(rows, size, columns) in (tile, None)
        share = blocks // tile.splits
        assert share * tile.splits == blocks
        assert 2 <= tile.stages <= share
        rings = tile.stages * ((64 * tile.parts + tile.rows) * 128 + 4 * tile.rows)
        assert rings + 2 * tile.parts * 64 * tile.rows <= 227 << 10
        splits.add(tile.splits)
    assert len(splits) == 1
    assert choose_fp8_tile(1, size, columns) is None
