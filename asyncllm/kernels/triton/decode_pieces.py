"""What the decode kernels share: which tokens a program attends to, how, and the sum of pieces."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
#: Below any score, yet finite: the difference of two is no NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def find_piece(first, stop, piece, SPLITS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Positions begin .. end - 1 of a piece of first .. stop - 1, and how many pieces there are.

    As many equal pieces, of whole tiles, as ``SPLITS`` and at least ``CHUNK`` tokens allow, and
    at least one.
    """
    if SPLITS == 1:
        begin, end, pieces = first, stop, 1
    else:
        share = (stop - first + SPLITS - 1) // SPLITS
        size = tl.maximum((share + TILE - 1) // TILE * TILE, CHUNK)
        begin = first + piece * size
        end = tl.minimum(begin + size, stop)
        pieces = tl.maximum((stop - first + size - 1) // size, 1)
    return begin, end, pieces


@triton.jit
def attend(
    queries,
    acc,
    total,
    peak,
    begin,
    end,
    keys,
    values,
    table,
    kv_head,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the tokens at begin .. end - 1 into a running softmax (peak, total, acc).

    Lanes behind the last token repeat it: what others left in its page is never read. The page
    numbers of a tile are loaded while the one before it is attended to.

    Args:
        queries: [M, D]; D is HEAD_DIM padded to a power of two with zeros.
        acc, total, peak: float32 [M, D], [M], [M]; scores, and so peak, are in units of log 2.
        table: the row's page numbers.
    """
    D: tl.constexpr = queries.shape[1]
    dim = tl.arange(0, D)
    lane = tl.arange(0, TILE)
    last = tl.maximum(end - 1, 0)
    position = tl.minimum(begin + lane, last)
    page = tl.load(table + position // PAGE_SIZE, mask=begin < end, other=0)
    for start in range(begin, end, TILE):
        cell = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = (cell * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
        if HEAD_DIM == D:
            k = tl.load(keys + at)
            v = tl.load(values + at)
        else:
            k = tl.load(keys + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        position = tl.minimum(start + TILE + lane, last)
        page = tl.load(table + position // PAGE_SIZE)
        acc, total, peak = take_tile(
            queries, k, v, start + lane < end, acc, total, peak, scale, softcap, HAS_SOFTCAP,
            PRECISION,
        )  # fmt: skip
    return acc, total, peak


@triton.jit
def take_tile(
    queries,
    k,
    v,
    exists,
    acc,
    total,
    peak,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the tokens of a tile that exist into a running softmax; k and v are finite."""
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    scores = in_log2(scores, scale, softcap, HAS_SOFTCAP)
    scores = tl.where(exists[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    total = total * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def in_log2(dots, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores of dot products, in units of log 2."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        return softcap * LOG2_E * (1 - 2 / (1 + tl.exp2(dots * (2 * LOG2_E * scale / softcap))))
    else:
        return dots * (scale * LOG2_E)


@triton.jit
def finish(
    acc,
    total,
    peak,
    row,
    kv_head,
    piece,
    pieces,
    out,
    partial,
    stats,
    arrivals,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the result of a row's only piece, or add it up if this is the last piece to arrive.

    Args:
        out: [rows, KV_HEADS, GROUP, HEAD_DIM].
        partial: float32 [rows, KV_HEADS, SPLITS, GROUP, HEAD_DIM].
        stats: float32 [rows, KV_HEADS, SPLITS, 2, GROUP]; peak and total of each piece.
        arrivals: int32 [rows, KV_HEADS]; zeros, and left so.
    """
    M: tl.constexpr = acc.shape[0]
    D: tl.constexpr = acc.shape[1]
    lane = tl.arange(0, M)
    dim = tl.arange(0, D)
    inside = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = lane[:, None] * HEAD_DIM + dim[None, :]
    pair = row.to(tl.int64) * KV_HEADS + kv_head
    out += pair * (GROUP * HEAD_DIM)
    # By itself, lest what follows is compiled without a workspace.
    if SPLITS == 1:  # noqa: SIM114
        _store_whole(out + at, acc, total, inside)
    elif pieces == 1:
        _store_whole(out + at, acc, total, inside)
    else:
        partial += pair * (SPLITS * GROUP * HEAD_DIM)
        stats += pair * (SPLITS * 2 * GROUP)
        stat = stats + piece * (2 * GROUP) + lane
        tl.store(partial + piece * (GROUP * HEAD_DIM) + at, acc, mask=inside)
        tl.store(stat, peak, mask=lane < GROUP)
        tl.store(stat + GROUP, total, mask=lane < GROUP)
        # All threads have stored before one of them announces it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == pieces - 1:
            tl.store(arrivals + pair, 0)
            _sum_pieces(out, partial, stats, pieces, GROUP, HEAD_DIM, D, STEP)


@triton.jit
def _store_whole(out, acc, total, inside):
    # The total of padding is 0.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pieces(
    out,
    partial,
    stats,
    pieces,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add up, in their order, the pieces of one row and K/V head, ``STEP`` at a time."""
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    step = tl.arange(0, STEP)[:, None]
    lane = tl.arange(0, G)
    dim = tl.arange(0, D)
    at = lane[:, None] * HEAD_DIM + dim[None, :]
    inside = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros([G, D], tl.float32)
    total = tl.zeros([G], tl.float32)
    peak = tl.full([G], LOWEST, tl.float32)
    for begin in range(0, pieces, STEP):
        piece = begin + step
        exists = (piece < pieces) & (lane < GROUP)[None, :]
        stat = stats + piece * (2 * GROUP) + lane[None, :]
        peaks = tl.load(stat, mask=exists, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(stat + GROUP, mask=exists, other=0.0, cache_modifier=".cg")
        part = partial + piece[:, :, None] * (GROUP * HEAD_DIM) + at[None, :, :]
        parts = tl.load(
            part, mask=exists[:, :, None] & inside[None, :, :], other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        fade = tl.exp2(peak - new_peak)
        weights = tl.exp2(peaks - new_peak[None, :])
        total = total * fade + tl.sum(weights * totals, axis=0)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * parts, axis=0)
        peak = new_peak
    _store_whole(out + at, acc, total, inside)
