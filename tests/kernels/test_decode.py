"""Decode attention over pages, against plain torch."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionSpec
from asyncllm.kernels.decode import decode_attention_reference, decode_heads_reference
from asyncllm.kernels.heads import HeadEncoding
from asyncllm.kernels.norm import Norm
from tests.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.decode import Cut, choose_cut, decode_attention
from asyncllm.kernels.triton.decode_heads import decode_heads

#: Triton's interpreter multiplies no bfloat16 matrices.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WHOLE = Cut(splits=1, chunk=16, tile=16, warps=4, stages=2)
SPLIT = Cut(splits=3, chunk=32, tile=16, warps=4, stages=2)
LENGTHS = (0, 1, 17, 101, 0, 64)


class Cache(NamedTuple):
    """Rows of ``LENGTHS`` in shuffled pages, which hold NaN wherever no row is."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    slots: Tensor
    lengths: Tensor


def make_cache(spec: AttentionSpec, dtype: torch.dtype, page_size: int = 16, new: int = 0) -> Cache:
    """Rows whose last ``new`` tokens are not yet written."""
    max_pages = -(-max(LENGTHS) // page_size)
    rows = len(LENGTHS)
    num_pages = rows * max_pages + 3
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "kv")
    # The last row of the table is that of padding.
    table = torch.randperm(num_pages)[: rows * max_pages].view(rows, max_pages)
    slots = torch.randperm(rows - 1)
    slots = torch.cat((slots, slots[:1]))
    slots[torch.tensor(LENGTHS) == 0] = rows - 1
    for slot, length in zip(slots.tolist(), LENGTHS, strict=True):
        at = torch.arange(max(length - new, 0))
        for pages in (keys, values):
            tokens = torch.randn(len(at), *shape[2:]).to(dtype)
            pages[table[slot, at // page_size], at % page_size] = tokens.to(DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    return Cache(keys, values, table.int().to(DEVICE), slots.int().to(DEVICE), lengths)


def make_spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(0, num_heads, num_kv_heads, head_dim, 0.3, window, softcap)


def make_queries(spec: AttentionSpec, dtype: torch.dtype) -> Tensor:
    """Heads that lie between others."""
    mixed = torch.randn(len(LENGTHS), spec.num_heads + 3, spec.head_dim, device=DEVICE)
    return mixed.to(dtype)[:, 1 : 1 + spec.num_heads]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.isfinite().all()
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[actual.dtype]


def check_attention(spec: AttentionSpec, dtype: torch.dtype, cut: Cut, page_size: int = 16) -> None:
    cache = make_cache(spec, dtype, page_size)
    q = make_queries(spec, dtype)
    expected = decode_attention_reference(q, *cache, spec)
    for _ in range(2):  # the second time with what the first left behind
        out = torch.full_like(expected, torch.nan)
        assert decode_attention(q, *cache, spec, out=out, cut=cut) is out
        assert_close(out, expected)
        assert (out[cache.lengths == 0] == 0).all()


@pytest.mark.parametrize("cut", [WHOLE, SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attends_like_the_reference(dtype: torch.dtype, cut: Cut) -> None:
    check_attention(make_spec(), dtype, cut)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(window=20),
        make_spec(window=1),
        make_spec(softcap=2.0),
        make_spec(window=70, softcap=2.0),
        make_spec(num_heads=10, num_kv_heads=2),
        make_spec(num_heads=3, num_kv_heads=3),
        make_spec(num_heads=17, num_kv_heads=1, head_dim=16),
        make_spec(head_dim=80),
    ],
    ids=str,
)
def test_attends_in_every_form(spec: AttentionSpec) -> None:
    check_attention(spec, torch.float16, SPLIT)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_any_page_size(page_size: int) -> None:
    check_attention(make_spec(), torch.float16, SPLIT, page_size)


def test_adds_up_more_pieces_than_it_loads_at_once() -> None:
    check_attention(
        make_spec(num_heads=16, num_kv_heads=1, head_dim=128),
        torch.float16,
        Cut(splits=9, chunk=16, tile=16, warps=4, stages=2),
    )


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 256, 1000])
@pytest.mark.parametrize("max_length", [16, 4096, 1 << 17])
def test_cuts_fit_the_rows(rows: int, max_length: int) -> None:
    cut = choose_cut(rows, make_spec(), max_length, 2)
    assert cut.chunk % cut.tile == 0
    assert 1 <= cut.splits <= max(max_length // cut.chunk, 1)


def test_no_rows() -> None:
    spec = make_spec()
    cache = make_cache(spec, torch.float16)
    q = make_queries(spec, torch.float16)[:0]
    nobody = cache._replace(slots=cache.slots[:0], lengths=cache.lengths[:0])
    assert decode_attention(q, *nobody, spec).shape == q.shape


def make_encoding(spec: AttentionSpec, dtype: torch.dtype, kind: str) -> HeadEncoding:
    if kind == "plain":
        return HeadEncoding(None, None, None)

    def norm() -> Norm:
        return Norm(torch.randn(spec.head_dim, device=DEVICE).to(dtype), 1e-5, kind == "offset")

    rotary_dim = spec.head_dim if kind == "whole" else spec.head_dim // 2
    angles = torch.randn(max(LENGTHS) + 7, rotary_dim // 2, device=DEVICE)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    return HeadEncoding(norm(), norm(), rope)


def check_heads(
    spec: AttentionSpec, dtype: torch.dtype, cut: Cut, kind: str, fused: bool = True
) -> None:
    page_size = 16
    encoding = make_encoding(spec, dtype, kind)
    cache = make_cache(spec, dtype, page_size, new=1)
    size = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.randn(len(LENGTHS), size + 8, device=DEVICE).to(dtype)[:, :size]
    last = (cache.lengths.long() - 1).clamp(min=0)
    pages = cache.block_table[cache.slots.long(), last // page_size].long()
    written = torch.where(cache.lengths > 0, pages * page_size + last % page_size, -1)
    positions = last + 5  # not where the tokens are

    expected_cache = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
    expected = decode_heads_reference(qkv, encoding, positions, written, *expected_cache, spec)

    out = torch.full_like(expected, torch.nan)
    decode_heads(qkv, encoding, positions, written, *cache, spec, out=out, cut=cut, fused=fused)
    assert_close(out, expected)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        cache.keys, expected_cache.keys, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(cache.values, expected_cache.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cut", [WHOLE, SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encodes_writes_and_attends(dtype: torch.dtype, cut: Cut) -> None:
    check_heads(make_spec(), dtype, cut, "half")


def test_encodes_and_attends_in_two_kernels() -> None:
    check_heads(make_spec(), torch.float16, SPLIT, "half", fused=False)


@pytest.mark.parametrize("kind", ["plain", "whole", "offset"])
def test_every_encoding(kind: str) -> None:
    check_heads(make_spec(), torch.float16, SPLIT, kind)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(window=20),
        make_spec(window=1),
        make_spec(softcap=2.0),
        make_spec(num_heads=10, num_kv_heads=2, head_dim=80),
    ],
    ids=str,
)
def test_encodes_in_every_form(spec: AttentionSpec) -> None:
    check_heads(spec, torch.float16, SPLIT, "half")
