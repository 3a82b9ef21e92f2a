"""Parts of attention in one order: where rows are cut, a tile of keys, and adding up pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.attention.decode_pieces import LOWEST, in_log2, load_page, place_of
from asyncllm.kernels.triton.launch import NATIVE, cdiv

#: Keys of a piece before each of these positions, and of the pieces after them.
BOUNDS = 4096, 16384, 65536
PIECES = 128, 512, 2048, 8192
_BOUND_1, _BOUND_2, _BOUND_3 = map(tl.constexpr, BOUNDS)
_PIECE_1, _PIECE_2, _PIECE_3, _PIECE_4 = map(tl.constexpr, PIECES)
_COUNT_1 = tl.constexpr(BOUNDS[0] // PIECES[0])
_COUNT_2 = tl.constexpr(BOUNDS[0] // PIECES[0] + (BOUNDS[1] - BOUNDS[0]) // PIECES[1])
_COUNT_3 = tl.constexpr(_COUNT_2.value + (BOUNDS[2] - BOUNDS[1]) // PIECES[2])


def keys_of_tile(dims: int) -> int:
    """Keys that are taken at a time; another number has other bits. Large heads take more room."""
    return 64 if dims <= 128 else 32


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
def take_piece(
    piece, least, whole, stop, queries, query_at, keys, values, table, kv_head, scale, softcap,
    window,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax (acc, total, peak) of the keys of a piece.

    Args:
        least: the first key that is seen, or the first of its tile.
        whole: all queries see every key before, so its tiles need no mask. 0 with a window.
        stop: the key after the last one that exists.
    """
    acc = tl.zeros([queries.shape[0], DIMS], tl.float32)
    totals = tl.zeros([queries.shape[0], KEYS], tl.float32)
    peak = tl.full([queries.shape[0]], LOWEST, tl.float32)
    begin = tl.maximum(begin_of(piece), least)
    end = tl.minimum(begin_of(piece + 1), stop)
    masked = begin
    if not HAS_WINDOW:
        masked = tl.maximum(tl.minimum(end, whole), begin)
        for key in range(begin, masked, KEYS):
            acc, totals, peak = _take_tile(
                acc, totals, peak, queries, query_at, keys, values, table, kv_head, key, stop,
                scale, softcap, window, False, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE, KV_HEADS,
                HEAD_DIM, KEYS, DIMS, PRECISION,
            )  # fmt: skip
    for key in range(masked, end, KEYS):
        acc, totals, peak = _take_tile(
            acc, totals, peak, queries, query_at, keys, values, table, kv_head, key, stop, scale,
            softcap, window, True, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM, KEYS,
            DIMS, PRECISION,
        )  # fmt: skip
    return acc, tl.sum(totals, axis=1), peak


@triton.jit
def _take_tile(
    acc, totals, peak, queries, query_at, keys, values, table, kv_head, begin, stop, scale, softcap,
    window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, PRECISION: tl.constexpr,
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
    if k.dtype != queries.dtype:
        k, v = _from_8_bits(k, v, queries.dtype)
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
def _from_8_bits(k, v, DTYPE: tl.constexpr):
    """Keys and values of 8-bit pages as numbers of a type.

    The compiler must not see that they had 8 bits: the tensor cores of a warp, unlike those of a
    warpgroup, would then add up products of other elements together.
    """
    k = k.to(DTYPE)
    v = v.to(DTYPE)
    if NATIVE:
        asm: tl.constexpr = "mov.b32 $0, $1;"
        k = tl.inline_asm_elementwise(asm, "=r,r", [k], dtype=k.dtype, is_pure=False, pack=2)
        v = tl.inline_asm_elementwise(asm, "=r,r", [v], dtype=v.dtype, is_pure=False, pack=2)
    return k, v


@triton.jit
def add_piece(acc, total, peak, piece_acc, piece_total, piece_peak):
    """Add a piece to the softmax of those before it."""
    new_peak = tl.maximum(peak, piece_peak)
    fade = tl.exp2(peak - new_peak)
    weight = tl.exp2(piece_peak - new_peak)
    acc = acc * fade[:, None] + piece_acc * weight[:, None]
    return acc, total * fade + piece_total * weight, new_peak
