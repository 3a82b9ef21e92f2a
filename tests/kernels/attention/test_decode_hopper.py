"""The kernel for decode attention of many rows on Hopper GPUs, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from tests.kernels.attention.test_decode import (
    KINDS,
    assert_close,
    check_overlap,
    make_cache,
    make_newest,
    make_queries,
    make_sinks,
    make_spec,
)
from tests.support.kernels.device import on_hopper

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention import decode
from asyncllm.kernels.triton.attention.decode import decode_heads
from asyncllm.kernels.triton.attention.decode_hopper import (
    FEW_PAIRS,
    ONE_WAVE,
    choose_pieces,
    launch,
    supports,
)
from asyncllm.kernels.triton.attention.decode_launch import MAX_PROGRAMS, UNENCODED, workspace_of
from asyncllm.kernels.triton.qk_norm_rope import encode_heads
from asyncllm.kernels.types import AttentionSpec, DecodeRows

LENGTHS = (0, 1, 2, 16, 17, 63, 64, 65, 66, 0, 127, 128, 129, 130, 500, 1000, 1337, 640, 641)
#: Rows in a single piece, and in several.
WHOLE, SPLIT = (1, 4096), (8, 128)


def attend(
    q: Tensor,
    cache: DecodeRows,
    spec: AttentionSpec,
    out: Tensor,
    overlaps_previous: bool = False,
    pieces: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
) -> None:
    heads = UNENCODED._replace(sinks=sinks)
    strides = q.stride(0), q.stride(1)
    launch(q, *strides, heads, cache, spec, out, overlaps_previous, pieces)


def check(
    spec: AttentionSpec,
    dtype: torch.dtype = torch.bfloat16,
    cut: tuple[int, int] = WHOLE,
    page_size: int = 16,
    sinks: Tensor | None = None,
) -> None:
    cache = make_cache(spec, dtype, page_size, row_lengths=LENGTHS)
    q = make_queries(spec, dtype, len(LENGTHS))
    expected = in_torch.decode_attention.reference(q, cache, spec, sinks=sinks)
    for _ in range(2):  # the second time with what the first left behind
        out = torch.full_like(expected, torch.nan)
        attend(q, cache, spec, out, pieces=cut, sinks=sinks)
        assert_close(out, expected)
        assert (out[cache.lengths == 0] == 0).all()
    assert not workspace_of(cache.keys.device, 1, spec, 1).arrivals.any()


@on_hopper
@pytest.mark.parametrize("cut", [WHOLE, SPLIT, (3, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attends_like_the_reference(dtype: torch.dtype, cut: tuple[int, int]) -> None:
    check(make_spec(32, 8, 128), dtype, cut)


@on_hopper
@pytest.mark.parametrize("cut", [WHOLE, SPLIT])
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(4, 4, 64),
        make_spec(16, 8, 128),
        make_spec(10, 2, 128),
        make_spec(16, 2, 64),
        make_spec(32, 2, 128),
        make_spec(24, 2, 64),
    ],
    ids=str,
)
def test_attends_in_every_form(spec: AttentionSpec, cut: tuple[int, int]) -> None:
    check(spec, cut=cut)


@on_hopper
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_any_page_size_that_it_supports(page_size: int) -> None:
    check(make_spec(16, 4, 128), cut=SPLIT, page_size=page_size)


@on_hopper
@pytest.mark.parametrize("cut", [WHOLE, SPLIT])
@pytest.mark.parametrize("spec", [make_spec(64, 8, 64), make_spec(10, 2, 128)], ids=str)
def test_sinks_take_part(spec: AttentionSpec, cut: tuple[int, int]) -> None:
    check(spec, cut=cut, sinks=make_sinks(spec, torch.bfloat16))


@on_hopper
@pytest.mark.parametrize("pieces", [None, WHOLE, SPLIT])
def test_overlapping_another_kernel_padding_is_left_alone(pieces: tuple[int, int] | None) -> None:
    spec = make_spec(32, 8, 128)
    cache = make_cache(spec, torch.bfloat16, row_lengths=LENGTHS)
    q = make_queries(spec, torch.bfloat16, len(LENGTHS))
    expected = in_torch.decode_attention.reference(q, cache, spec)
    out = torch.full_like(expected, 7.0)
    attend(q, cache, spec, out, True, pieces)
    living = cache.lengths > 0
    assert_close(out[living], expected[living])
    assert (out[~living] == 7.0).all()


def many_rows(
    spec: AttentionSpec, dtype: torch.dtype, new: int = 0, more: int = 70, longest: int = 1300
) -> DecodeRows:
    """More rows than ``decode`` is as fast for, and padding."""
    lengths = torch.randint(1, 300, (FEW_PAIRS // spec.num_kv_heads + more,)).tolist()
    return make_cache(spec, dtype, new=new, row_lengths=(0, *lengths, 1, longest))


@on_hopper
def test_takes_what_it_supports() -> None:
    """Of many rows, and as ``decode`` calls it."""
    spec = make_spec(32, 8, 128)
    cache = many_rows(spec, torch.bfloat16)
    q = make_queries(spec, torch.bfloat16, len(cache.lengths))
    rows = cache
    assert supports(q, rows, spec)
    assert not supports(q[: FEW_PAIRS // 8], rows, spec)
    assert not supports(q.half(), rows, spec)
    assert not supports(q.float(), rows._replace(keys=cache.keys.float()), spec)
    assert not supports(q, rows, make_spec(32, 8, 128, window=99))
    assert not supports(q, rows, make_spec(32, 8, 128, softcap=9.0))
    out = decode.decode_attention(q, cache, spec, out=torch.full_like(q, torch.nan))
    assert_close(out, in_torch.decode_attention.reference(q, cache, spec))


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (make_spec(16, 8, 128), 70),
        (make_spec(32, 8, 128), 1),
        (make_spec(64, 8, 64), 1),
        (make_spec(20, 4, 128), 1),
        (make_spec(128, 8, 128), 1),
    ],
    ids=str,
)
def test_encodes_writes_and_attends(
    spec: AttentionSpec, more: int, dtype: torch.dtype, kind: str
) -> None:
    cache = many_rows(spec, dtype, 1, more)
    newest = make_newest(spec, dtype, cache, kind)
    expected_cache = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
    expected = in_torch.decode_heads.reference(*newest, expected_cache, spec)
    out = torch.full_like(expected, torch.nan)
    decode_heads(*newest, cache, spec, out=out)
    assert_close(out, expected)
    # The kernel for heads alone rounds where this one does, which the reference does not.
    qkv, encoding, positions, written = newest
    encode_heads(qkv.clone(), spec, encoding, positions, *expected_cache[:2], written)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        cache.keys, expected_cache.keys, rtol=eps, atol=4 * eps, equal_nan=True
    )
    torch.testing.assert_close(cache.values, expected_cache.values, rtol=0, atol=0, equal_nan=True)


@on_hopper
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("more", "longest"), [(70, 1300), (40, 3000), (1, 3000)])
def test_launches_that_overlap(more: int, longest: int, fused: bool) -> None:
    spec = make_spec(num_heads=16, num_kv_heads=8, head_dim=128)
    check_overlap(spec, many_rows(spec, torch.bfloat16, 1, more, longest), 10, fused=fused)


@pytest.mark.parametrize("rows", [3, 8, 17, 64, 65, 256, 1000])
@pytest.mark.parametrize("max_length", [16, 4096, 1 << 17])
def test_pieces_fit_the_rows(rows: int, max_length: int) -> None:
    spec = make_spec(32, 8, 128)
    splits, chunk = choose_pieces(rows, spec, max_length)
    assert 1 <= splits <= max(max_length // chunk, 1)
    assert rows * 8 * splits <= max(MAX_PROGRAMS, rows * 8)
    if rows * 8 <= ONE_WAVE // 2:
        assert rows * 8 * splits <= ONE_WAVE
        assert 2 * rows * 8 * splits > ONE_WAVE or splits == max(max_length // chunk, 1)
