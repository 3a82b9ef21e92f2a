"""Projections with 8-bit weights against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels import linear as in_torch
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.quantized import Fp8Rows
from asyncllm.kernels.triton.activation import gated, gated_rows
from asyncllm.kernels.triton.gemm.fp8 import Tile, fp8_skinny
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.gemm.linear import gated_linear, linear, linear_with_rest
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.types import FP8_BLOCK, FP8_MAX, Fp8Matrix, Norm
from tests.support.kernels.device import DEVICE, needs_fp8, on_hopper

pytestmark = needs_fp8

DTYPES = [torch.bfloat16, torch.float16]


def random_matrix(size: int, columns: int, *, blocked: bool) -> Fp8Matrix:
    data = (torch.randn(size, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-size // 128), -(-columns // 128)) if blocked else (size, 1)
    scale = (torch.rand(shape) + 0.5) / 1000
    return Fp8Matrix(data.to(DEVICE), scale.to(DEVICE))


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows further apart than they are long."""
    return torch.randn(rows, columns + 8, device=DEVICE).to(dtype)[:, :columns]


def quantized(
    x: Tensor, norm: Norm | None, *, blocked: bool, multiple: int
) -> tuple[Tensor, Tensor]:
    """``quantize_rows`` in plain torch."""
    if norm is not None:
        x = rms_norm.reference(x, norm)
    x = F.pad(x, (0, 0, 0, -len(x) % multiple))
    pieces = x.float().unflatten(1, (-1, FP8_BLOCK if blocked else x.shape[1]))
    scale = pieces.abs().amax(2, keepdim=True).clamp(min=1e-12) / FP8_MAX
    data = (pieces / scale).clamp(-FP8_MAX, FP8_MAX).flatten(1).to(torch.float8_e4m3fn)
    return data, scale.squeeze(2).t().contiguous().t()


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 0.02) -> None:
    assert torch.isfinite(got).all()
    assert got.dtype == expected.dtype
    error = (got.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "columns"),
    [
        *((1, 48, 512), (3, 33, 384), (5, 300, 128), (16, 80, 256)),
        *((1, 20, columns) for columns in (4224, 6144, 8448)),  # each has tiles of its own
    ],
)
def test_few_rows(rows: int, size: int, columns: int, blocked: bool, dtype: torch.dtype) -> None:
    x, matrix = random_rows(rows, columns, dtype), random_matrix(size, columns, blocked=blocked)
    bias = torch.randn(size, device=DEVICE).to(dtype)
    assert_near(linear(x, matrix, bias), in_torch.linear.reference(x, matrix, bias))


@pytest.mark.parametrize("tile", [Tile(16, 4, 3), Tile(32, 2, 2)])
@pytest.mark.parametrize("rows", [2, 11])
@pytest.mark.parametrize("blocked", [False, True])
def test_skinny(blocked: bool, rows: int, tile: Tile) -> None:
    x, matrix = random_rows(rows, 384, torch.bfloat16), random_matrix(2 * 168, 384, blocked=blocked)
    for act in (None, "silu"):
        got = fp8_skinny(tile, Projection(x, matrix, act=act))
        assert_near(got, in_torch.linear.reference(x, matrix, act=act))


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("blocked", [False, True])
def test_norm_and_activation(blocked: bool, rows: int, offset: float | None) -> None:
    x, matrix = random_rows(rows, 384, torch.bfloat16), random_matrix(2 * 168, 384, blocked=blocked)
    norm = Norm(torch.randn(384, device=DEVICE).to(x.dtype), 1e-6, offset)
    expected = in_torch.linear.reference(x, matrix, norm=norm, act="silu")
    assert_near(linear(x, matrix, norm=norm, act="silu"), expected)


@pytest.mark.parametrize(("columns", "rest"), [(384, 5), (2304, 8)])
@pytest.mark.parametrize("offset", [None, 1.0])
def test_rows_in_16_bits_beside(columns: int, rest: int, offset: float | None) -> None:
    x = random_rows(1, columns, torch.bfloat16)
    matrix = random_matrix(40, columns, blocked=True)
    weight = torch.randn(rest, columns, device=DEVICE).to(x.dtype)
    norm = Norm(torch.randn(columns, device=DEVICE).to(x.dtype), 1e-6, offset)
    got = linear_with_rest(x, matrix, weight, norm=norm)
    expected = in_torch.linear_with_rest.reference(x, matrix, weight, norm=norm)
    for part, wanted in zip(got, expected, strict=True):
        assert_near(part, wanted)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("blocked", [False, True])
def test_residual(blocked: bool, rows: int) -> None:
    x, matrix = random_rows(rows, 128, torch.bfloat16), random_matrix(40, 128, blocked=blocked)
    whole = torch.full((5, 48), torch.nan, dtype=x.dtype, device=DEVICE)
    residual = whole[:rows, :40].copy_(torch.randn(rows, 40))
    expected = in_torch.linear.reference(x, matrix, residual=residual.clone())
    assert linear(x, matrix, residual=residual) is residual
    assert_near(residual, expected)
    assert whole[rows:].isnan().all()
    assert whole[:, 40:].isnan().all()


@pytest.mark.parametrize("norm", [None, False, True])
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("columns", [128, 384, 2304])
def test_quantized_rows(columns: int, blocked: bool, norm: bool | None) -> None:
    x = random_rows(5, columns, torch.bfloat16)
    x[1] = 0
    x[2] *= 1000
    given = (
        None if norm is None else Norm(torch.rand(columns, device=DEVICE).to(x.dtype), 1e-6, norm)
    )
    data, scale = quantize_rows(x, norm=given, blocked=blocked, multiple=4)
    expected, expected_scale = quantized(x, given, blocked=blocked, multiple=4)
    assert data.shape == expected.shape == (8, columns)
    assert scale.shape == expected_scale.shape
    assert scale.stride(0) == 1
    # On a GPU only elements on the edge of two steps may differ, by one of them; the interpreter
    # does not always carry from the mantissa into the exponent.
    width = columns // scale.shape[1]
    got = data.float() * scale.repeat_interleave(width, 1)
    wanted = expected.float() * expected_scale.repeat_interleave(width, 1)
    tolerance = 0.003 if DEVICE == "cuda" else 0.03
    assert (got - wanted).abs().mean() <= tolerance * wanted.abs().mean()
    torch.testing.assert_close(scale, expected_scale, rtol=0.02, atol=0.0)
    assert not data[1].float().any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("blocked", [False, pytest.param(True, marks=on_hopper)])
@pytest.mark.parametrize("rows", [20, 65, 300])
def test_many_rows(rows: int, blocked: bool) -> None:
    x, matrix = random_rows(rows, 512, torch.bfloat16), random_matrix(256, 512, blocked=blocked)
    norm = Norm(torch.rand(512, device=DEVICE).to(x.dtype), 1e-6)
    expected = in_torch.linear.reference(x, matrix, norm=norm)
    assert_near(linear(x, matrix, norm=norm), expected, tolerance=0.06)


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [3, 8])
def test_activation_that_rounds(rows: int, act: str) -> None:
    """The same bits as of two kernels."""
    x = random_rows(rows, 2 * 1280, torch.bfloat16) * 3
    x[1] = 0
    got = gated_rows(x, act, 4)
    data, scale = quantize_rows(gated(x, act), blocked=True, multiple=4)
    assert (got.rows, got.dtype) == (rows, x.dtype)
    assert got.data.view(torch.uint8).equal(data.view(torch.uint8))
    assert got.scale.equal(scale.t())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@on_hopper
@pytest.mark.parametrize("rows", [5, 100, 300])
def test_two_projections(rows: int) -> None:
    """Whether the activation rounds or not, the same bits come out."""
    x = random_rows(rows, 512, torch.bfloat16)
    first = random_matrix(2 * 8192, 512, blocked=True)
    second = random_matrix(512, 8192, blocked=True)
    hidden = gated_linear(x, first, None, "silu", second)
    assert isinstance(hidden, Fp8Rows) == (rows > 64)
    apart = linear(x, first, act="silu")
    assert linear(hidden, second).equal(linear(apart, second))
