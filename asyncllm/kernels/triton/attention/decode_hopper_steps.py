"""Steps of ``decode_hopper``: begin with the newest token, attend to tiles, and write results."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from asyncllm.kernels.triton.attention.decode_hopper_parts import (
    K_FREE,
    K_FULL,
    TILE,
    V_FREE,
    V_FULL,
    barrier,
    heads_layout,
    is_own,
    products_layout,
    within_head,
)
from asyncllm.kernels.triton.attention.decode_pieces import LOG2_E, LOWEST


@gluon.jit
def begin(heads, piece, shared, layer: gl.constexpr):
    """Copy queries to shared memory, and begin the softmax with the newest token, if it is ours.

    The previous kernels or this one write the newest token, so no tile contains it: tiles may be
    loaded before that.

    Args:
        heads: of ``load_heads``.

    Returns:
        sums [head_dim, columns], totals [TILE, columns] and peak [columns] of the softmax. There is
        a partial total for each token of a tile, so that threads exchange nothing before the end.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    PRODUCTS: gl.constexpr = products_layout(layer.columns)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    shared.heads.store(heads)
    queries = shared.heads.slice(0, layer.columns).load(LAYOUT)
    key = shared.heads.slice(layer.group, 1).load(LAYOUT)
    value = shared.heads.slice(layer.group + 1, 1).permute((1, 0)).load(PRODUCTS)
    # Lanes after the queries are columns, too; their results are discarded.
    shared.q.store(queries)
    exists = piece.newest >= 0
    scores = gl.sum(queries.to(gl.float32) * key.to(gl.float32), 1)
    scores = gl.convert_layout(scores, COLUMN) * (layer.scale * LOG2_E)
    lowest = gl.full([layer.columns], LOWEST, gl.float32, layout=COLUMN)
    peak = gl.where(exists, scores, lowest)
    sums = gl.zeros([layer.head_dim, layer.columns], gl.float32, layout=PRODUCTS)
    sums += value.to(gl.float32)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    none = gl.zeros([TILE, layer.columns], gl.float32, layout=PRODUCTS)
    totals = gl.where(((place == 0) & exists)[:, None], none + 1.0, none)
    fence_async_shared()
    debug_barrier()  # all threads have stored their queries
    return sums, totals, peak


@gluon.jit
def attend(sums, totals, peak, shared, piece, number, layer: gl.constexpr):
    """Take the tile of this number into the softmax."""
    PRODUCTS: gl.constexpr = products_layout(layer.columns)
    stage = number % layer.stages
    parity = (number // layer.stages) & 1
    none = gl.zeros([TILE, layer.columns], gl.float32, layout=PRODUCTS)
    mbarrier.wait(barrier(shared, K_FULL, stage, layer), parity)
    q = shared.q.permute((1, 0))
    scores = warpgroup_mma(shared.k.index(stage), q, none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(barrier(shared, K_FREE, stage, layer), count=1)
    scores *= layer.scale * LOG2_E
    count = piece.end - piece.begin - number * TILE
    if count < TILE:
        place = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
        scores = gl.where((place < count)[:, None], scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 0))
    weights = gl.exp2(scores - new_peak[None, :])
    fade = gl.exp2(peak - new_peak)
    totals = totals * fade[None, :] + weights
    p = shared.p.permute((1, 0))
    p.store(weights.to(shared.p.dtype))
    mbarrier.wait(barrier(shared, V_FULL, stage, layer), parity)
    if count < TILE:
        _clear(shared.v.index(stage), count, layer)
    fence_async_shared()
    debug_barrier()  # all threads have stored their weights
    v = shared.v.index(stage).permute((1, 0))
    sums = warpgroup_mma(v, p, sums * fade[None, :], is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(barrier(shared, V_FREE, stage, layer), count=1)
    return sums, totals, new_peak


@gluon.jit
def _clear(values, count, layer: gl.constexpr):
    """Clear all but ``count`` tokens: unwritten memory may be NaN, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    v = values.load(LAYOUT)
    values.store(gl.where((token < count)[:, None], v, gl.zeros_like(v)))


@gluon.jit
def take_sinks(sums, total, peak, memory, piece, layer: gl.constexpr):
    """Take the heads' sinks into the softmax of the piece with the newest token.

    In another one too, they would count several times.
    """
    LANE: gl.constexpr = gl.SliceLayout(1, heads_layout(layer.head_dim))
    lane = gl.minimum(gl.arange(0, layer.columns, layout=LANE), layer.group - 1)
    own = gl.load(memory.sinks + piece.kv_head * layer.group + lane).to(gl.float32) * LOG2_E
    own = gl.where(piece.newest >= 0, own, float("-inf"))
    new_peak = gl.maximum(peak, own)
    fade = gl.exp2(peak - new_peak)
    return sums * fade[:, None], total * fade + gl.exp2(own - new_peak), new_peak


@gluon.jit
def finish(sums, total, peak, memory, piece, layer: gl.constexpr):
    """Store the result of a row's only piece; of several, the last to arrive adds them up."""
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    SIZE: gl.constexpr = layer.group * layer.head_dim // layer.fold
    head = gl.arange(0, layer.columns, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    at = head[:, None] * (layer.head_dim // layer.fold) + within_head(dim, layer)[None, :]
    exists = head < layer.group
    inside = exists[:, None] & is_own(head, dim, layer)
    pair = piece.row * layer.kv_heads + piece.kv_head
    out = memory.out + pair * SIZE + at
    if piece.pieces > 1:
        first = pair * memory.splits
        partial = memory.partial + first * SIZE + at
        stats = memory.stats + first * (2 * layer.group) + head
        stat = stats + piece.number * (2 * layer.group)
        gl.store(partial + piece.number * SIZE, sums, mask=inside)
        gl.store(stat, peak, mask=exists)
        gl.store(stat + layer.group, total, mask=exists)
        debug_barrier()  # all threads have stored before one of them announces it
        arrived = gl.atomic_add(memory.arrivals + pair, 1, sem="acq_rel") + 1
        if arrived == piece.pieces:
            gl.store(memory.arrivals + pair, 0)
            sums, total = _add_up(partial, stats, piece.pieces, inside, exists, layer)
            _store(out, sums, total, inside)
    else:
        _store(out, sums, total, inside)


@gluon.jit
def _add_up(partial, stats, pieces, inside, exists, layer: gl.constexpr):
    """Sums and total of all pieces of a row, added up in order."""
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    LANE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    sums = gl.zeros([layer.columns, layer.head_dim], gl.float32, layout=LAYOUT)
    total = gl.zeros([layer.columns], gl.float32, layout=LANE)
    peak = gl.full([layer.columns], LOWEST, gl.float32, layout=LANE)
    for number in range(pieces):
        stat = stats + number * (2 * layer.group)
        at = partial + number * (layer.group * layer.head_dim // layer.fold)
        its_peak = gl.load(stat, mask=exists, other=LOWEST, cache_modifier=".cg")
        its_total = gl.load(stat + layer.group, mask=exists, other=0.0, cache_modifier=".cg")
        part = gl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = gl.maximum(peak, its_peak)
        fade = gl.exp2(peak - new_peak)
        gain = gl.exp2(its_peak - new_peak)
        total = total * fade + its_total * gain
        sums = sums * fade[:, None] + part * gain[:, None]
        peak = new_peak
    return sums, total


@gluon.jit
def _store(out, sums, total, inside):
    # Padding has a total of 0.
    total = gl.maximum(total, 1e-30)
    gl.store(out, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)
