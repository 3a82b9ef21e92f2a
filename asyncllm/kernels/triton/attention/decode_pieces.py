"""Parts of a decode program: cutting a row, attending to a tile, and adding up pieces."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
#: Below any score, yet finite, so that differences are not NaN.
LOWEST = tl.constexpr(-1e30)
#: Elements of pieces that a program adds up at a time.
MERGED = tl.constexpr(4096)


@triton.jit
def cut_row(
    row,
    lengths,
    slots,
    block_table,
    table_stride,
    window,
    splits,
    chunk,
    HAS_WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Cut all tokens of a row but the newest into pieces.

    A piece has ``chunk`` tokens, or more whole tiles if there would be more than ``splits`` pieces.

    Returns:
        The row's length; its page numbers; the range first .. stop - 1 of its older tokens; and the
        size of a piece.
    """
    length = tl.load(lengths + row, eviction_policy="evict_last").to(tl.int32)
    slot = tl.load(slots + row, eviction_policy="evict_last").to(tl.int64)
    table = block_table + slot * table_stride
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    stop = tl.maximum(length - 1, first)
    share = tl.cdiv(stop - first, splits)
    return length, table, first, stop, tl.maximum(tl.cdiv(share, TILE) * TILE, chunk)


@triton.jit
def load_page(table, token, exists, PAGE_SIZE: tl.constexpr):
    """The page numbers of tokens; kept in the L2 while K and V pass through it."""
    return tl.load(table + token // PAGE_SIZE, mask=exists, other=0, eviction_policy="evict_last")


@triton.jit
def place_of(
    page,
    token,
    kv_head,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The offsets of tokens' heads in the flattened pages.

    Heads are counted in 32 bits, which halves the address arithmetic of the loop over tiles.
    """
    head = (page * PAGE_SIZE + token % PAGE_SIZE) * KV_HEADS + kv_head
    return head.to(tl.int64) * HEAD_DIM


@triton.jit
def take_tile(
    queries,
    k,
    v,
    exists,
    acc,
    totals,
    peak,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take those tokens of a tile that exist into a running softmax; k and v are finite.

    Args:
        k, v: as they are in pages, which may be 8-bit.
        scale: of scores, or of those of each query, [G, 1].
        totals: [G, TILE]; a partial total for each lane of a tile. Threads own their lanes, so
            they exchange nothing before the end.
    """
    k = k.to(queries.dtype)
    v = v.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    scores = in_log2(scores, scale, softcap, HAS_SOFTCAP)
    scores = tl.where(exists[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_peak[:, None])
    fade = tl.exp2(peak - new_peak)
    totals = totals * fade[:, None] + weights
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, totals, new_peak


@triton.jit
def take_sinks(acc, total, peak, sinks):
    """Take each lane's sink into a running softmax; ``sinks`` are scores, [lanes]."""
    scores = sinks.to(tl.float32) * LOG2_E
    new_peak = tl.maximum(peak, scores)
    fade = tl.exp2(peak - new_peak)
    return acc * fade[:, None], total * fade + tl.exp2(scores - new_peak), new_peak


@triton.jit
def in_log2(dots, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores from dot products, as exponents of 2."""
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
    pair,
    piece,
    pieces,
    splits,
    out,
    partial,
    stats,
    arrivals,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Store the result of a row's only piece; of several, the last to arrive adds them up.

    Args:
        pair: number of the row and K/V head.
        out: [pairs, GROUP, HEAD_DIM].
        partial: float32 [pairs, splits, GROUP, HEAD_DIM].
        stats: float32 [pairs, splits, 2, GROUP]; peak and total of each piece.
        arrivals: int32 [pairs]; zeros before and after.
    """
    M: tl.constexpr = acc.shape[0]
    D: tl.constexpr = acc.shape[1]
    lane = tl.arange(0, M)
    dim = tl.arange(0, D)
    inside = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = lane[:, None] * HEAD_DIM + dim[None, :]
    out += pair * (GROUP * HEAD_DIM)
    if pieces == 1:
        _store_whole(out + at, acc, total, inside)
    else:
        partial += pair * splits * (GROUP * HEAD_DIM)
        stats += pair * splits * (2 * GROUP)
        stat = stats + piece * (2 * GROUP) + lane
        tl.store(partial + piece * (GROUP * HEAD_DIM) + at, acc, mask=inside)
        tl.store(stat, peak, mask=lane < GROUP)
        tl.store(stat + GROUP, total, mask=lane < GROUP)
        # All threads have stored before one of them announces it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == pieces - 1:
            tl.store(arrivals + pair, 0)
            _sum_pieces(out, partial, stats, pieces, GROUP, HEAD_DIM, D)


@triton.jit
def _store_whole(out, acc, total, inside):
    # Padding has a total of 0.
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    tl.store(out, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pieces(
    out,
    partial,
    stats,
    pieces,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Add up the pieces of a row and K/V head in order, as many at a time as fit."""
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    STEP: tl.constexpr = max(min(MERGED // (G * D), 32), 1)
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
