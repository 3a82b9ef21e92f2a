"""Parts of attention in one order: where rows are cut, a tile of keys, and adding up pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.attention.decode_pieces import LOWEST, in_log2, load_page, place_of
from asyncllm.kernels.triton.launch import cdiv

#: Keys of a tile. Another number has other bits.
KEYS = tl.constexpr(32)
#: Keys of a piece before each of these positions, and of the pieces after them.
BOUNDS = 4096, 16384, 65536
PIECES = 128, 512, 2048, 8192
_BOUND_1, _BOUND_2, _BOUND_3 = map(tl.constexpr, BOUNDS)
_PIECE_1, _PIECE_2, _PIECE_3, _PIECE_4 = map(tl.constexpr, PIECES)
_COUNT_1 = tl.constexpr(BOUNDS[0] // PIECES[0])
_COUNT_2 = tl.constexpr(BOUNDS[0] // PIECES[0] + (BOUNDS[1] - BOUNDS[0]) // PIECES[1])
_COUNT_3 = tl.constexpr(_COUNT_2.value + (BOUNDS[2] - BOUNDS[1]) // PIECES[2])


def count_pieces(length: int) -> int:
    """Pieces of a row of so many keys."""
    count, begin = 0, 0
    for bound, size in zip((*BOUNDS, length), PIECES, strict=True):
        count += max(cdiv(min(bound, length) - begin, size), 0)
        begin = bound
    return count


@triton.jit
def begin_of(piece):
    """The first position of a piece."""
    begin = piece * _PIECE_1
    begin = tl.where(piece > _COUNT_1, _BOUND_1 + (piece - _COUNT_1) * _PIECE_2, begin)
    begin = tl.where(piece > _COUNT_2, _BOUND_2 + (piece - _COUNT_2) * _PIECE_3, begin)
    return tl.where(piece > _COUNT_3, _BOUND_3 + (piece - _COUNT_3) * _PIECE_4, begin)


@triton.jit
def piece_of(position):
    """The piece that a position is in."""
    piece = position // _PIECE_1
    piece = tl.where(position >= _BOUND_1, _COUNT_1 + (position - _BOUND_1) // _PIECE_2, piece)
    piece = tl.where(position >= _BOUND_2, _COUNT_2 + (position - _BOUND_2) // _PIECE_3, piece)
    return tl.where(position >= _BOUND_3, _COUNT_3 + (position - _BOUND_3) // _PIECE_4, piece)


@triton.jit
def take_tile(
    acc, totals, peak, queries, query_at, keys, values, table, kv_head, begin, stop, scale, softcap,
    window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take KEYS keys from ``begin`` on, of which those before ``stop`` exist, into a softmax."""
    dim = tl.arange(0, DIMS)[None, :]
    key_at = begin + tl.arange(0, KEYS)
    # Keys past the last one repeat it, as a page may contain anything after it, even NaN.
    token = tl.minimum(key_at, stop - 1) if MASKED else key_at
    page = load_page(table, token, True, PAGE_SIZE)
    at = place_of(page, token, kv_head, PAGE_SIZE, KV_HEADS, HEAD_DIM)[:, None] + dim
    if HEAD_DIM == DIMS:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    else:
        k = tl.load(keys + at, mask=dim < HEAD_DIM, other=0.0)
        v = tl.load(values + at, mask=dim < HEAD_DIM, other=0.0)
    k = k.to(queries.dtype)  # pages may be 8-bit
    v = v.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    scores = in_log2(scores, scale, softcap, HAS_SOFTCAP)
    if MASKED:
        seen = key_at[None, :] <= query_at[:, None]
        if HAS_WINDOW:
            seen &= key_at[None, :] > query_at[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    totals = totals * fade[:, None] + weights
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, totals, new_peak


@triton.jit
def add_piece(acc, total, peak, piece_acc, piece_total, piece_peak):
    """Add a piece to the softmax of those before it."""
    new_peak = tl.maximum(peak, piece_peak)
    fade = tl.exp2(peak - new_peak)
    weight = tl.exp2(piece_peak - new_peak)
    acc = acc * fade[:, None] + piece_acc * weight[:, None]
    return acc, total * fade + piece_total * weight, new_peak


@triton.jit
def no_keys(QUERIES: tl.constexpr, DIMS: tl.constexpr):
    """The softmax of no keys."""
    return (
        tl.zeros([QUERIES, DIMS], tl.float32),
        tl.zeros([QUERIES, KEYS], tl.float32),
        tl.full([QUERIES], LOWEST, tl.float32),
    )
