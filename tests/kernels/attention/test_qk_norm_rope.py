"""Head encoding against its reference in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, Norm
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.qk_norm_rope import encode_heads

#: Three roundings, which Triton's interpreter does by truncation.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAX_LENGTH = 40
#: By kind of norm.
OFFSETS = {"plain": None, "gemma": 1.0, "gemma4": 0.0}


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: no rotary positions


def encoding_of(shape: Shape, dtype: torch.dtype, norm: str | None) -> HeadEncoding:
    def make() -> Norm | None:
        if norm is None:
            return None
        weight = torch.randn(shape.head_dim, device=DEVICE).to(dtype)
        return Norm(weight, 1e-6, OFFSETS[norm])

    angles = 7 * torch.randn(MAX_LENGTH, shape.rotary_dim // 2, device=DEVICE)
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1) if shape.rotary_dim else None
    return HeadEncoding(make(), make(), rope)


def doubled(encoding: HeadEncoding) -> HeadEncoding:
    def norm(of: Norm | None) -> Norm | None:
        return None if of is None else of._replace(weight=of.weight.double())

    rope = None if encoding.rope is None else encoding.rope.double()
    return encoding._replace(q_norm=norm(encoding.q_norm), k_norm=norm(encoding.k_norm), rope=rope)


def check(
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    norm: str | None = "plain",
    tokens: int = 7,
    normalizes_values: bool = False,
    **layer: Any,
) -> None:
    """Both ways from the same inputs, with pages that were NaN."""
    spec = AttentionSpec(0, *shape[:3], 1.0, **layer)
    width = spec.projected_size
    qkv = torch.randn(tokens, width + 16, device=DEVICE).to(dtype)[:, :width]
    encoding = encoding_of(shape, dtype, norm)._replace(normalizes_values=normalizes_values)
    if spec.shares is not None:
        encoding = encoding._replace(k_norm=None)
    positions = torch.randint(MAX_LENGTH, (tokens,), device=DEVICE)
    pages = torch.full((4, 3, shape.kv_heads, shape.head_dim), torch.nan, device=DEVICE)
    written = torch.randperm(12, device=DEVICE)[:tokens]
    written[1::3] = -1

    def pages_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return pages.to(dtype, copy=True), pages.to(dtype, copy=True)

    expected_qkv, expected_pages = qkv.double(), pages_of(torch.float64)
    in_torch.encode_heads.reference(
        expected_qkv, spec, doubled(encoding), positions, *expected_pages, written
    )
    actual_pages = pages_of(dtype)
    assert (
        encode_heads(qkv, spec, encoding, positions, *actual_pages, written).shape[1] == shape.heads
    )
    for actual, expected in zip((qkv, *actual_pages), (expected_qkv, *expected_pages), strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            actual.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [None, *OFFSETS])
@pytest.mark.parametrize("rotary_dim", [0, 64])
def test_kinds(rotary_dim: int, norm: str | None, dtype: torch.dtype) -> None:
    check(Shape(4, 2, 64, rotary_dim), dtype, norm)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 2, 16, 16),
        Shape(14, 2, 64, 64),
        Shape(3, 1, 80, 32),  # rotary positions for some of each head
        Shape(3, 3, 96, 96),
        Shape(5, 1, 128, 96),
        Shape(1, 1, 256, 256),
        Shape(40, 8, 128, 128),
        Shape(8, 2, 512, 512),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_shapes(shape: Shape) -> None:
    check(shape)
    check(shape, torch.bfloat16)


@pytest.mark.parametrize("normalizes_values", [False, True])
@pytest.mark.parametrize("layer", [{}, {"values_are_keys": True}, {"shares": 3}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kinds_of_layers(
    dtype: torch.dtype, layer: dict[str, Any], normalizes_values: bool
) -> None:
    shape = Shape(6, 3, 64, 64)
    check(shape, dtype, "gemma4", normalizes_values=normalizes_values, **layer)


@pytest.mark.parametrize("rotary_dim", [8, 20, 64])
def test_pairs_apart(rotary_dim: int) -> None:
    check(Shape(2, 1, 64, rotary_dim), pair_distance=32)


def test_numbers_of_tokens() -> None:
    check(Shape(2, 1, 32, 32), tokens=0)
    check(Shape(2, 1, 32, 32), tokens=1)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes 9 GB")
def test_pages_beyond_32_bits() -> None:
    """Offsets of pages do not fit 32 bits."""
    spec = AttentionSpec(0, 1, 8, 128, scale=1.0)
    keys = torch.zeros(140_000, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    values = torch.zeros_like(keys)
    qkv = torch.randn(1, 17 * 128, dtype=torch.bfloat16, device=DEVICE)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    last = torch.full((1,), 140_000 * 16 - 1, device=DEVICE)
    encode_heads(qkv, spec, HeadEncoding(None, None, None), position, keys, values, last)
    for pages, heads in ((keys, qkv[0, 128 : 9 * 128]), (values, qkv[0, 9 * 128 :])):
        assert torch.equal(pages[-1, -1].flatten(), heads)
        assert not pages[:-1].any()
