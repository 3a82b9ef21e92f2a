"""Decode attention over pages, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding, Norm
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads
from asyncllm.kernels.triton.attention.decode_launch import Cut, choose_cut, workspace_of
from asyncllm.kernels.triton.norm import rms_norm

#: Triton's interpreter multiplies no bfloat16 matrices.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WHOLE = Cut(splits=1, chunk=16, tile=16, warps=4, stages=2)
SPLIT = Cut(splits=3, chunk=32, tile=16, warps=4, stages=2)
LENGTHS = (0, 1, 17, 101, 0, 64)


def make_cache(
    spec: AttentionSpec,
    dtype: torch.dtype,
    page_size: int = 16,
    new: int = 0,
    row_lengths: tuple[int, ...] = LENGTHS,
) -> DecodeRows:
    """Rows in shuffled pages, which hold NaN wherever no row is.

    The last ``new`` tokens of each row are not yet written.
    """
    max_pages = -(-max(row_lengths) // page_size)
    rows = len(row_lengths)
    num_pages = rows * max_pages + 3
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "kv")
    # The last row of the table is that of padding.
    table = torch.randperm(num_pages)[: rows * max_pages].view(rows, max_pages)
    living = torch.tensor(row_lengths) > 0
    slots = torch.full((rows,), rows - 1)
    slots[living] = torch.randperm(rows - 1)[: int(living.sum())]
    for slot, length in zip(slots.tolist(), row_lengths, strict=True):
        at = torch.arange(max(length - new, 0))
        for pages in (keys, values):
            tokens = torch.randn(len(at), *shape[2:]).to(dtype)
            pages[table[slot, at // page_size], at % page_size] = tokens.to(DEVICE)
    lengths = torch.tensor(row_lengths, dtype=torch.int32, device=DEVICE)
    return DecodeRows(keys, values, table.int().to(DEVICE), slots.int().to(DEVICE), lengths)


def make_spec(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(0, num_heads, num_kv_heads, head_dim, 0.3, window, softcap)


def make_sinks(spec: AttentionSpec, dtype: torch.dtype = torch.float16) -> Tensor:
    """From those that hardly count to one that takes nearly all the weight."""
    return torch.linspace(-9.0, 9.0, spec.num_heads, device=DEVICE).to(dtype)


def make_queries(spec: AttentionSpec, dtype: torch.dtype, rows: int = len(LENGTHS)) -> Tensor:
    """Heads that lie between others."""
    mixed = torch.randn(rows, spec.num_heads + 3, spec.head_dim, device=DEVICE)
    return mixed.to(dtype)[:, 1 : 1 + spec.num_heads]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.isfinite().all()
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[actual.dtype]


def check_attention(spec: AttentionSpec, dtype: torch.dtype, cut: Cut, page_size: int = 16) -> None:
    cache = make_cache(spec, dtype, page_size)
    q = make_queries(spec, dtype)
    expected = in_torch.decode_attention.reference(q, cache, spec)
    for _ in range(2):  # the second time with what the first left behind
        out = torch.full_like(expected, torch.nan)
        assert decode_attention(q, cache, spec, out=out, cut=cut) is out
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
        make_spec(num_heads=8, num_kv_heads=1, head_dim=512),
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


@pytest.mark.parametrize(
    "cut",
    [
        Cut(splits=2, chunk=64, tile=32, warps=1, stages=2),
        Cut(splits=8, chunk=32, tile=32, warps=4, stages=3),
        Cut(splits=1, chunk=64, tile=128, warps=4, stages=2),
    ],
    ids=str,
)
def test_rows_of_very_different_lengths(cut: Cut) -> None:
    spec = make_spec()
    row_lengths = (1, 300, 33, 2, 0, 128, 65, 64)
    cache = make_cache(spec, torch.float16, row_lengths=row_lengths)
    q = make_queries(spec, torch.float16, len(row_lengths))
    out = decode_attention(q, cache, spec, out=torch.full_like(q, torch.nan), cut=cut)
    assert_close(out, in_torch.decode_attention.reference(q, cache, spec))


def test_pieces_leave_no_arrivals_behind() -> None:
    spec = make_spec()
    cache = make_cache(spec, torch.float16)
    for _ in range(3):
        decode_attention(make_queries(spec, torch.float16), cache, spec, cut=SPLIT)
        assert not workspace_of(cache.keys.device, 1, spec, 1).arrivals.any()


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 256, 1000])
@pytest.mark.parametrize("max_length", [16, 4096, 1 << 17])
def test_cuts_fit_the_rows(rows: int, max_length: int) -> None:
    for spec in (make_spec(), make_spec(head_dim=512)):
        cut = choose_cut(rows, spec, max_length, 2)
        assert cut.chunk % cut.tile == 0
        assert 1 <= cut.splits <= max(max_length // cut.chunk, 1)
    assert cut.warps == 8, "fewer do not have the registers for heads of 512"


def test_no_rows() -> None:
    spec = make_spec()
    cache = make_cache(spec, torch.float16)
    q = make_queries(spec, torch.float16)[:0]
    nobody = cache._replace(slots=cache.slots[:0], lengths=cache.lengths[:0])
    assert decode_attention(q, nobody, spec).shape == q.shape


#: Norms and rotary positions; half: of half of a head's elements; values:
#: these are normalised, too.
KINDS = ("plain", "norm", "rotary", "half", "whole", "offset")


def make_encoding(
    spec: AttentionSpec, dtype: torch.dtype, kind: str, positions: int
) -> HeadEncoding:
    def norm() -> Norm | None:
        if kind in ("plain", "rotary"):
            return None
        offset = {"offset": 1.0, "values": 0.0}.get(kind)
        return Norm(torch.randn(spec.head_dim, device=DEVICE).to(dtype), 1e-5, offset)

    k_norm = norm() if spec.shares is None else None
    if kind in ("plain", "norm"):
        return HeadEncoding(norm(), k_norm, None)
    rotary_dim = spec.head_dim // 2 if kind in ("half", "offset") else spec.head_dim
    angles = torch.randn(positions, rotary_dim // 2, device=DEVICE)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    return HeadEncoding(norm(), k_norm, rope, normalizes_values=kind == "values")


def last_cells(cache: DecodeRows) -> Tensor:
    """Where the last token of each row is in the flattened pages; -1 for padding."""
    last = (cache.lengths.long() - 1).clamp(min=0)
    page_size = cache.keys.shape[1]
    pages = cache.block_table[cache.slots.long(), last // page_size].long()
    return torch.where(cache.lengths > 0, pages * page_size + last % page_size, -1)


class Newest(NamedTuple):
    """The first arguments of ``decode_heads``."""

    qkv: Tensor
    encoding: HeadEncoding
    positions: Tensor
    written: Tensor


def make_newest(spec: AttentionSpec, dtype: torch.dtype, cache: DecodeRows, kind: str) -> Newest:
    """Tokens that are still to be encoded, and written to the ends of a cache's rows."""
    size = spec.projected_size
    qkv = torch.randn(len(cache.lengths), size + 8, device=DEVICE).to(dtype)[:, :size]
    positions = cache.lengths.long() + 4  # not where the tokens are
    encoding = make_encoding(spec, dtype, kind, int(positions.max()) + 1)
    return Newest(qkv, encoding, positions, last_cells(cache))


def check_heads(
    spec: AttentionSpec, dtype: torch.dtype, cut: Cut, kind: str, fused: bool = True
) -> None:
    cache = make_cache(spec, dtype, new=1 if spec.shares is None else 0)
    newest = make_newest(spec, dtype, cache, kind)
    expected_cache = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
    expected = in_torch.decode_heads.reference(*newest, expected_cache, spec)

    out = torch.full_like(expected, torch.nan)
    decode_heads(*newest, cache, spec, out=out, cut=cut, fused=fused)
    assert_close(out, expected)
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        cache.keys, expected_cache.keys, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    tolerance = tolerance if kind == "values" else 0.0
    torch.testing.assert_close(
        cache.values, expected_cache.values, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check_overlap(
    spec: AttentionSpec,
    cache: DecodeRows,
    times: int,
    cut: Cut | None = None,
    fused: bool | None = None,
) -> None:
    """Each launch starts before what writes its input has finished, with other inputs each time.

    Args:
        cache: rows whose newest token is not yet written.
        times: launches of a graph, and replays of it.
    """
    newest = make_newest(spec, torch.bfloat16, cache, "whole")
    inputs = torch.randn(times, *newest.qkv.shape, device=DEVICE).bfloat16()
    plain = Norm(torch.ones(inputs.shape[-1], dtype=inputs.dtype, device=DEVICE), 1e-5)

    def run(between: Callable[[], None]) -> list[Tensor]:
        outs = []
        for x in inputs:
            qkv = rms_norm(x, plain)
            between()
            at = newest._replace(qkv=qkv)
            outs.append(decode_heads(*at, cache, spec, cut=cut, fused=fused))
            between()
        return outs

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(lambda: None)
    for _ in range(times):
        inputs.normal_()
        graph.replay()
        for out, expected in zip(outs, run(torch.cuda.synchronize), strict=True):
            assert torch.equal(out, expected)
    assert not workspace_of(cache.keys.device, 1, spec, 1).arrivals.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("warps", [1, 4])
def test_launches_that_overlap(warps: int, fused: bool) -> None:
    spec = make_spec(num_heads=16, num_kv_heads=8, head_dim=128)
    cache = make_cache(spec, torch.bfloat16, new=1, row_lengths=(1, 99, 33, 0, 64))
    cut = Cut(splits=8, chunk=32, tile=32, warps=warps, stages=2)
    check_overlap(spec, cache, 20, cut, fused)


@pytest.mark.parametrize("cut", [WHOLE, SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_encodes_writes_and_attends(dtype: torch.dtype, cut: Cut) -> None:
    check_heads(make_spec(), dtype, cut, "half")


def test_encodes_and_attends_in_two_kernels() -> None:
    check_heads(make_spec(), torch.float16, SPLIT, "half", fused=False)


@pytest.mark.parametrize("kind", [*KINDS, "values"])
def test_every_encoding(kind: str) -> None:
    check_heads(make_spec(), torch.float16, SPLIT, kind)


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(window=20),
        make_spec(window=1),
        make_spec(softcap=2.0),
        make_spec(num_heads=10, num_kv_heads=2, head_dim=80),
        make_spec(num_heads=8, num_kv_heads=1, head_dim=512),
    ],
    ids=str,
)
def test_encodes_in_every_form(spec: AttentionSpec) -> None:
    check_heads(spec, torch.float16, SPLIT, "half")


@pytest.mark.parametrize("kind", ["half", "values"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "layer", [{"values_are_keys": True}, {"shares": 3}, {"pair_distance": 8}], ids=str
)
def test_kinds_of_layers(layer: dict[str, Any], fused: bool, kind: str) -> None:
    check_heads(replace(make_spec(), **layer), torch.float16, SPLIT, kind, fused)
