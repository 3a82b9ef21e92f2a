"""RMSNorm kernel against its reference in float64."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels import norm as in_torch
from asyncllm.kernels.types import Norm
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.norm import rms_norm

#: Two roundings, which Triton's interpreter does by truncation.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(x: torch.Tensor, *, offset: float | None = None) -> None:
    weight = torch.randn(x.shape[-1], device=DEVICE).to(x.dtype)
    actual = rms_norm(x, Norm(weight, 1e-6, offset))
    expected = in_torch.rms_norm.reference(x.double(), Norm(weight.double(), 1e-6, offset))
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("size", [64, 100, 1024, 2560, 16384])
def test_sizes(size: int, offset: float | None, dtype: torch.dtype) -> None:
    check(torch.randn(3, size, device=DEVICE).to(dtype), offset=offset)


def test_many_rows_and_none() -> None:
    check(torch.randn(600, 64, device=DEVICE))
    check(torch.randn(0, 64, device=DEVICE))


def test_any_leading_shape() -> None:
    check(torch.randn(128, device=DEVICE))
    check(torch.randn(2, 3, 5, 128, device=DEVICE))


@pytest.mark.parametrize("tokens", [5, 300])
def test_groups_have_weights_of_their_own(tokens: int) -> None:
    x, weight = (torch.randn(*shape, 4, 100, device=DEVICE) for shape in ((tokens,), ()))
    actual = rms_norm(x, Norm(weight, 1e-6))
    expected = in_torch.rms_norm.reference(x.double(), Norm(weight.double(), 1e-6))
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


def test_strided_rows() -> None:
    wide = torch.randn(6, 512, device=DEVICE).bfloat16()
    check(wide[:, 100:300])  # rows that are not aligned
    check(wide[::2, 128:256])
    check(wide.view(6, 4, 128)[:, 1:3])  # no one stride leads from row to row


def test_magnitudes() -> None:
    """The mean of squares neither overflows 16 bits nor drowns eps."""
    check(torch.randn(2, 256, device=DEVICE).half() * 1000)
    check(torch.zeros(2, 256, device=DEVICE))


def test_a_bad_row_spoils_no_other() -> None:
    x = torch.randn(4, 256, device=DEVICE)
    x[1] = torch.nan
    y = rms_norm(x, Norm(torch.ones(256, device=DEVICE), 1e-6))
    assert y.isnan().all(dim=-1).tolist() == [False, True, False, False]
    assert y.isnan().any(dim=-1).tolist() == [False, True, False, False]


def test_a_row_has_the_same_bits_among_many() -> None:
    size = 64  # of which a program takes 32 rows
    x = torch.randn(1024, size, device=DEVICE).bfloat16()
    norm = Norm(torch.randn(size, device=DEVICE).bfloat16(), 1e-6)
    together = rms_norm(x, norm)
    for start, end in ((0, 1), (5, 8), (1000, 1024)):
        assert torch.equal(rms_norm(x[start:end], norm), together[start:end])
