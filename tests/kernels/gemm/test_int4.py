"""Projections with 4-bit weights against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels import linear as in_torch
from asyncllm.kernels.quantized import dequantize_int4, pack_int4
from asyncllm.kernels.triton.gemm.int4 import Tile, dequantize, int4_skinny
from asyncllm.kernels.triton.gemm.linear import linear
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.types import Int4Matrix, Norm
from tests.support.kernels.device import DEVICE

DTYPES = [torch.bfloat16, torch.float16]
#: Of what passes through several kernels: the interpreter rounds to bfloat16 too coarsely.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def random_matrix(size: int, columns: int, group: int, *, ordered: bool = False) -> Int4Matrix:
    codes = torch.randint(0, 16, (size, columns), dtype=torch.uint8)
    zero = torch.randint(0, 17, (columns // group, size), dtype=torch.uint8)
    scale = torch.rand(columns // group, size).add(0.5).div(64).to(torch.float16)
    order = torch.randperm(columns).to(DEVICE) if ordered else None
    packed = pack_int4(codes, group)
    return Int4Matrix(packed.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE), order)


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows further apart than they are long."""
    return torch.randn(rows, columns + 8, device=DEVICE).to(dtype)[:, :columns]


def assert_near(got: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(got).all()
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= 0.02 * expected.double().abs().max(), error


@pytest.mark.parametrize("block", [32, 64, 128])
def test_codes_come_back(block: int) -> None:
    codes = torch.randint(0, 16, (7, 256), dtype=torch.uint8)
    scale, zero = torch.ones(256 // block, 7), torch.zeros(256 // block, 7, dtype=torch.uint8)
    matrix = Int4Matrix(pack_int4(codes, block), scale, zero)
    assert torch.equal(dequantize_int4(matrix), codes.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_dequantize(group: int, dtype: torch.dtype) -> None:
    matrix = random_matrix(45, 256, group)
    expected = dequantize_int4(matrix).to(dtype)
    assert_near(dequantize(matrix, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size", "columns", "group"),
    [(1, 48, 512, 128), (3, 33, 384, 128), (5, 48, 96, 32), (8, 16, 128, 64), (17, 80, 256, 256)],
)
def test_plain(rows: int, size: int, columns: int, group: int, dtype: torch.dtype) -> None:
    x, matrix = random_rows(rows, columns, dtype), random_matrix(size, columns, group)
    bias = torch.randn(size, device=DEVICE).to(dtype)
    assert_near(linear(x, matrix, bias), in_torch.linear.reference(x, matrix, bias))


@pytest.mark.parametrize("tile", [Tile(16, 4, 3, 4), Tile(32, 2, 2, 2), Tile(64, 1, 2, 4)])
@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("group", [32, 128])
def test_skinny(group: int, rows: int, tile: Tile) -> None:
    x, matrix = random_rows(rows, 384, torch.bfloat16), random_matrix(2 * 40, 384, group)
    for act in (None, "silu"):
        got = int4_skinny(tile, Projection(x, matrix, act=act))
        assert_near(got, in_torch.linear.reference(x, matrix, act=act))


@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_norm_and_activation(offset: float | None, rows: int) -> None:
    x, matrix = random_rows(rows, 256, DTYPE), random_matrix(2 * 40, 256, 128)
    norm = Norm(torch.randn(256, device=DEVICE).to(x.dtype), 1e-6, offset)
    expected = in_torch.linear.reference(x, matrix, norm=norm, act="silu")
    assert_near(linear(x, matrix, norm=norm, act="silu"), expected)


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("ordered", [False, True])
def test_residual_and_order(ordered: bool, rows: int) -> None:
    x = random_rows(rows, 128, DTYPE)
    matrix = random_matrix(40, 128, 32, ordered=ordered)
    norm = Norm(torch.randn(128, device=DEVICE).to(x.dtype), 1e-6)
    residual = torch.randn(rows, 40, device=DEVICE).to(x.dtype)
    expected = in_torch.linear.reference(x, matrix, norm=norm, residual=residual.clone())
    got = linear(x, matrix, norm=norm, residual=residual)
    assert got is residual
    assert_near(got, expected)


def test_rows_past_the_last_are_not_written() -> None:
    x, matrix = random_rows(8, 128, torch.bfloat16), random_matrix(40, 128, 128)
    whole = torch.full((8, 48), torch.nan, dtype=x.dtype, device=DEVICE)
    out = whole[:3, :40]
    out.zero_()
    linear(x[:3], matrix, residual=out)
    assert_near(out, in_torch.linear.reference(x[:3], matrix))
    assert whole[3:].isnan().all()
    assert whole[:, 40:].isnan().all()
