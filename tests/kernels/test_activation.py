"""Gated activations against their reference in float64."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels import activation as in_torch
from asyncllm.kernels.activation import ACTIVATIONS
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.activation import gated

# Where exp overflows to infinity, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

#: One rounding, which Triton's interpreter does by truncation.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(x: torch.Tensor, act: str) -> None:
    actual = gated(x, act)
    expected = in_torch.gated.reference(x.double(), act)
    assert actual.dtype == x.dtype
    assert actual.is_contiguous()
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act: str, dtype: torch.dtype) -> None:
    check(4 * torch.randn(3, 2 * 1100, device=DEVICE).to(dtype), act)


@pytest.mark.parametrize("size", [1, 24, 1024, 3072])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_sizes(rows: int, size: int) -> None:
    check(torch.randn(rows, 2 * size, device=DEVICE).bfloat16(), "silu")


def test_strided_rows() -> None:
    check(torch.randn(4, 500, device=DEVICE)[:, 10:210], "silu")


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_far_from_zero(act: str) -> None:
    """Nothing overflows where the activation is 0 or x, and NaN stays."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -0.0, 20.0, 100.0, 1e4, torch.nan], device=DEVICE)
    x = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    expected = in_torch.gated.reference(x.double(), act).float()
    torch.testing.assert_close(gated(x, act), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
