"""Steps of the warpgroups of ``prefill_hopper``: score, add up values, and write results."""

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

from asyncllm.kernels.triton.attention.decode_pieces import LOG2_E, LOWEST
from asyncllm.kernels.triton.attention.prefill_hopper_parts import (
    HALF,
    K_FREE,
    K_FULL,
    QUERIES,
    ROW,
    SCORES,
    STAGES,
    V_FREE,
    V_FULL,
    VECTORS,
    places_of,
    sums_layout,
)
from asyncllm.kernels.triton.attention.prefill_tiles import KEYS, MAX_PIECES
from asyncllm.kernels.triton.waiting import MAX_POLLS, fail_after


@gluon.jit
def score(queries, keys):
    """Begin to score a block."""
    none = gl.zeros([HALF, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(queries, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def first_block(scores, units, shared, number, query_at, block, length, layer: gl.constexpr):
    """Weights of the first block, their sums and peaks; keys from ``length`` on do not exist."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, sums_layout(layer.head_dim), 2)
    stage = number % STAGES
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(shared.barriers.index(K_FREE + stage), count=1)
    total = gl.zeros([HALF], gl.float32, layout=ROW)
    peak = gl.full([HALF], LOWEST, gl.float32, layout=ROW)
    weights, total, peak, _ = _softmax(scores, units, total, peak, query_at, block, True, layer)
    weights = gl.convert_layout(weights.to(shared.k.dtype), LEFT)
    mbarrier.wait(shared.barriers.index(V_FULL + stage), (number // STAGES) & 1)
    if (block + 1) * KEYS > length:
        # Unwritten memory may be NaN, and 0 * NaN is NaN. Both warpgroups write the same zeros.
        v = shared.v.index(stage).load(VECTORS)
        key_at = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, VECTORS))
        shared.v.index(stage).store(gl.where((key_at < length)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        debug_barrier()
    return weights, total, peak


@gluon.jit
def next_block(
    sums, weights, total, peak, units, queries, shared, number, query_at, block,
    MASKED: gl.constexpr, layer: gl.constexpr,
):  # fmt: skip
    """Score a block, and add up the values of the previous one, whose weights are given."""
    stage = number % STAGES
    before = (number - 1) % STAGES
    parity = (number // STAGES) & 1
    mbarrier.wait(shared.barriers.index(K_FULL + stage), parity)
    scores = score(queries, shared.k.index(stage))
    sums = warpgroup_mma(weights, shared.v.index(before), sums, is_async=True)
    scores, sums = warpgroup_mma_wait(1, deps=(scores, sums))
    mbarrier.arrive(shared.barriers.index(K_FREE + stage), count=1)
    new, total, peak, fade = _softmax(scores, units, total, peak, query_at, block, MASKED, layer)
    # Waiting for V here, which is a loop, also keeps the assembler from moving the wait for sums
    # ahead of the softmax.
    mbarrier.wait(shared.barriers.index(V_FULL + stage), parity)
    sums, new = warpgroup_mma_wait(0, deps=(sums, new))
    mbarrier.arrive(shared.barriers.index(V_FREE + before), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
    return sums, weights, total, peak


@gluon.jit
def _softmax(
    scores, units, total, peak, query_at, block, MASKED: gl.constexpr, layer: gl.constexpr
):
    """Weights of a block, sum and peak so far, and the factor of earlier sums.

    Args:
        units: what one is in the scores of each query, ([HALF],); nothing if it is one.
    """
    if len(units) > 0:
        scores = scores * units[0][:, None]
    factor: gl.constexpr = (layer.scale if layer.softcap == 0 else 1.0) * LOG2_E
    if layer.softcap > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        turned: gl.constexpr = 2 * LOG2_E * layer.scale / layer.softcap
        scores = layer.softcap * (1 - 2 / (1 + gl.exp2(scores * turned)))
    if MASKED:
        key_at = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        seen = key_at[None, :] <= query_at[:, None]
        if layer.window > 0:
            seen = seen & (key_at[None, :] > query_at[:, None] - layer.window)
        scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_peak[:, None])
    fade = gl.exp2(peak - new_peak)
    return weights, total * fade + gl.sum(weights, 1), new_peak, fade


@gluon.jit
def take_sinks(half: gl.constexpr, sums, total, peak, sinks, kv_head, counts, layer: gl.constexpr):
    """Take the sink of each query's head into its softmax, if it ``counts`` in this piece."""
    lane = half * HALF + gl.arange(0, HALF, layout=ROW)
    own = gl.load(sinks + kv_head * layer.group + lane % layer.group).to(gl.float32) * LOG2_E
    own = gl.where(counts, own, float("-inf"))
    new_peak = gl.maximum(peak, own)
    fade = gl.exp2(peak - new_peak)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    return sums, total * fade + gl.exp2(own - new_peak), new_peak


@gluon.jit
def store(half: gl.constexpr, results, result, tile, kv_head, layer: gl.constexpr):
    """Write the results of a warpgroup's queries."""
    token, head, dim, exists = places_of(half, tile, kv_head, layer)
    row = token * (layer.kv_heads * layer.group) + head
    mask = exists[:, None] & (dim >= 0)[None, :]
    gl.store(results.out + row[:, None] * layer.head_dim + dim[None, :], result, mask=mask)


@gluon.jit
def store_piece(half: gl.constexpr, results, sums, total, peak, item, layer: gl.constexpr):
    """Write a piece for ``add_up``."""
    gl.store(results.partial + _partial_at(half, item, layer.head_dim), sums)
    stat = results.stats + item * (2 * QUERIES) + half * HALF + gl.arange(0, HALF, layout=ROW)
    gl.store(stat, total)
    gl.store(stat + QUERIES, peak)


@gluon.jit
def await_pieces(half: gl.constexpr, results, pair, pieces):
    """Announce that this piece is stored, and wait for all pieces of its tile.

    Programs can wait for each other, since all run at once and each has only one piece: see
    ``kernels.triton.waiting``.
    """
    # All threads have stored before one of them announces it.
    debug_barrier()
    arrival = results.arrivals + pair * 2 + half
    stored = gl.atomic_add(arrival, 1, sem="acq_rel") + 1
    polls = 0
    while (stored < pieces) & (polls < MAX_POLLS):
        stored = gl.atomic_add(arrival, 0, sem="acquire")
        polls += 1
    fail_after(polls, arrival)
    # The last one to leave resets the counter.
    known = gl.atomic_add(arrival, 1, sem="relaxed") + 1
    gl.store(arrival, 0, mask=known == 2 * pieces)


@gluon.jit
def add_up(
    half: gl.constexpr, results, first_item, piece, pieces, tile, kv_head, layer: gl.constexpr
):
    """Add up all pieces for this program's share of the queries, and write the results.

    Each number of pieces that is a case of its own takes 10 % of the time to compile the kernel.
    """
    if pieces <= 4:
        _add_up(half, results, first_item, piece, pieces, tile, kv_head, layer, 4)
    else:
        _add_up(half, results, first_item, piece, pieces, tile, kv_head, layer, MAX_PIECES)


@gluon.jit
def _add_up(
    half: gl.constexpr, results, first_item, piece, pieces, tile, kv_head, layer: gl.constexpr,
    MOST: gl.constexpr,
):  # fmt: skip
    """``add_up`` of at most MOST pieces, all of which are read at once."""
    LANES: gl.constexpr = HALF // MOST
    ALL: gl.constexpr = pieces_layout(MOST, layer.head_dim)
    SUMS: gl.constexpr = gl.SliceLayout(0, ALL)
    one = gl.arange(0, MOST, layout=gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None]
    lanes = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :]
    every = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, gl.SliceLayout(1, ALL)))
    every = gl.expand_dims(gl.expand_dims(every, 0), 1)
    exists = (one < pieces) & (lanes >= 0)
    for first in range(piece * LANES, HALF, pieces * LANES):
        at = (first_item + one) * (2 * QUERIES) + half * HALF + first + lanes
        totals = gl.load(results.stats + at, mask=exists, other=0.0, cache_modifier=".cg")
        peaks = gl.load(
            results.stats + at + QUERIES, mask=exists, other=LOWEST, cache_modifier=".cg"
        )
        row = (first_item + one) * QUERIES + half * HALF + first + lanes
        at = gl.expand_dims(row * layer.head_dim, 2) + every
        mask = gl.expand_dims(exists, 2) & (every >= 0)
        parts = gl.load(results.partial + at, mask=mask, other=0.0, cache_modifier=".cg")
        peak = gl.max(peaks, 0)
        gains = gl.exp2(peaks - gl.expand_dims(peak, 0))
        total = gl.sum(gains * totals, 0)
        sums = gl.sum(gl.expand_dims(gains, 2) * parts, 0)
        total = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, SUMS))
        lane = half * HALF + first + gl.arange(0, LANES, layout=gl.SliceLayout(1, SUMS))
        dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, SUMS))
        token = tile.first + lane // layer.group
        here = (lane < QUERIES // layer.group * layer.group) & (token < tile.end)
        head = kv_head * layer.group + lane % layer.group
        place = token.to(gl.int64) * (layer.kv_heads * layer.group) + head
        gl.store(
            results.out + place[:, None] * layer.head_dim + dim[None, :],
            (sums / total[:, None]).to(results.out.dtype.element_ty),
            mask=here[:, None] & (dim >= 0)[None, :],
        )


@gluon.constexpr_function
def pieces_layout(most, head_dim):
    """The layout of [pieces, lanes, head_dim]: all pieces of an element in one thread."""
    across = head_dim // 4
    return gl.BlockedLayout([most, 1, 4], [1, 32 // across, across], [1, 4, 1], [2, 1, 0])


@gluon.jit
def _partial_at(half: gl.constexpr, item, HEAD_DIM: gl.constexpr):
    lane = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums_layout(HEAD_DIM)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, sums_layout(HEAD_DIM)))
    return (item * QUERIES + lane)[:, None] * HEAD_DIM + dim[None, :]
