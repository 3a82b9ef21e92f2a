"""What the warps of ``extend_hopper`` do: copy keys and values, score, add up, and write results."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from asyncllm.kernels.triton.extend_tiles import FIELDS

LOG2_E = gl.constexpr(1.4426950408889634)
#: Below any score, yet finite: the difference of two is no NaN.
LOWEST = gl.constexpr(-1e30)

#: Queries of a warpgroup, times the heads that share them, and of both; keys of a block; blocks of
#: keys, and of values, that shared memory holds.
HALF = gl.constexpr(64)
QUERIES = gl.constexpr(128)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
#: Elements of 128 bytes, which is how wide a copy to shared memory can be.
SPAN = gl.constexpr(64)
#: The most pieces of a tile, and the fewest blocks of one: adding them up takes time.
MAX_PIECES = gl.constexpr(8)
MIN_BLOCKS = gl.constexpr(4)

#: Barriers of each stage: it has been filled, or it has been read by both warpgroups.
K_FULL, V_FULL, K_FREE, V_FREE = (gl.constexpr(i * STAGES.value) for i in range(4))

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
#: For tensors in global memory: 16 bytes of each thread.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


class Layer(NamedTuple):
    """Constants of a layer; 0 for no softcap and no window."""

    scale: Any
    softcap: Any
    window: Any
    kv_heads: Any
    group: Any
    head_dim: Any


class Shared(NamedTuple):
    """Shared memory.

    Attributes:
        q: [4, HALF, head_dim]; queries of this turn and of the next, by warpgroup.
        k, v: [STAGES, KEYS, head_dim].
    """

    q: Any
    k: Any
    v: Any
    barriers: Any


class Work(NamedTuple):
    """What there is to do: ``items`` in all, so many ``pieces`` of each of the ``tiles``."""

    tiles: Any
    items: Any
    pieces: Any


class Queries(NamedTuple):
    """Queries in global memory, and the steps from one token, or head, to the next."""

    start: Any
    token_stride: Any
    head_stride: Any


class Results(NamedTuple):
    """Global memory for results, and for what is known of each piece until they can be added up.

    Attributes:
        partial: float32 [items, QUERIES, head_dim]; weighted values.
        stats: float32 [items, 2, QUERIES]; sum and peak of the weights.
        arrivals: int32 [2 * tiles * kv_heads]; zeros, and left so.
    """

    out: Any
    partial: Any
    stats: Any
    arrivals: Any


class Tile(NamedTuple):
    """See ``extend_tiles.find_tiles``."""

    first: Any
    end: Any
    shift: Any
    slot: Any
    length: Any


class Blocks(NamedTuple):
    """Blocks of keys of a piece: the first and the last, and from which on keys are hidden from
    some query; ``pieces`` is how many of the tile's have any."""

    first: Any
    last: Any
    hidden: Any
    pieces: Any


@gluon.constexpr_function
def sums_layout(head_dim: int) -> gl.NVMMADistributedLayout:
    """Of sums of weighted values, [HALF, head_dim]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])


@gluon.jit
def item_of(turn):
    """What this program attends to in that turn: a piece of a tile for a K/V head, as one number.

    The longest tiles come first, and programs go over them back and forth: so all get equal shares.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def tile_of(work, pair, layer: gl.constexpr):
    """Of a tile and K/V head."""
    entry = work.tiles + (1 + pair // layer.kv_heads) * FIELDS
    return Tile(
        gl.load(entry),
        gl.load(entry + 1),
        gl.load(entry + 2),
        gl.load(entry + 3),
        gl.load(entry + 4),
    )


@gluon.jit
def blocks_of(tile, piece, pieces, layer: gl.constexpr):
    """Of a piece; without any, the last is the one before the first."""
    first = 0
    hidden = (tile.first + tile.shift + 1) // KEYS
    if layer.window > 0:
        first = gl.maximum(tile.first + tile.shift + 1 - layer.window, 0) // KEYS
        hidden = first
    last = (tile.end + tile.shift - 1) // KEYS
    count = last - first + 1
    size = gl.maximum((count + pieces - 1) // pieces, MIN_BLOCKS)
    last = gl.maximum(last - piece * size, first - 1)
    first = gl.maximum(last - size + 1, first)
    return Blocks(first, last, hidden, (count + size - 1) // size)


@gluon.jit
def produce(
    pages,
    copies,
    barriers,
    FULL: gl.constexpr,
    FREE: gl.constexpr,
    block_table,
    work,
    layer: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Have the keys, or values, of all items copied as stages become free, last block first."""
    COPIED: gl.constexpr = pages.block_type.shape[0]
    PARTS: gl.constexpr = KEYS // COPIED
    SPANS: gl.constexpr = layer.head_dim // SPAN
    # In shared memory all rows of the first 128 bytes lie before those of the next.
    boxes = copies._reinterpret(copies.dtype, [STAGES * SPANS * PARTS, COPIED, SPAN], SHARED)
    start, stride = block_table
    turn = 0
    number = 0
    item = item_of(turn)
    while item < work.items:
        pair = item // work.pieces
        tile = tile_of(work, pair, layer)
        blocks = blocks_of(tile, item % work.pieces, work.pieces, layer)
        table = start + tile.slot.to(gl.int64) * stride
        column = pair % layer.kv_heads * layer.head_dim
        for i in range(blocks.last - blocks.first + 1):
            cells = ()
            for part in gl.static_range(PARTS):
                # There may be no page behind that of the last position: that one is copied again.
                at = gl.minimum((blocks.last - i) * KEYS + part * COPIED, tile.length - 1)
                page = gl.load(table + at // PAGE_SIZE)
                cells += (page * PAGE_SIZE + at % PAGE_SIZE // COPIED * COPIED,)
            stage = number % STAGES
            full = barriers.index(FULL + stage)
            mbarrier.wait(barriers.index(FREE + stage), (number // STAGES + 1) & 1)
            mbarrier.expect(full, KEYS * layer.head_dim * 2)
            for part in gl.static_range(PARTS):
                for span in gl.static_range(SPANS):
                    box = boxes.index((stage * SPANS + span) * PARTS + part)
                    at = [cells[part], column + span * SPAN]
                    tma.async_copy_global_to_shared(pages, at, full, box)
            number += 1
        turn += 1
        item = item_of(turn)


@gluon.jit
def load_queries(half: gl.constexpr, queries, copies, tile, kv_head, layer: gl.constexpr):
    """Begin to copy a warpgroup's queries to shared memory."""
    token, head, dim, exists = _places(half, tile, kv_head, layer)
    at = (token * queries.token_stride + head * queries.head_stride)[:, None] + dim[None, :]
    mask = exists[:, None] & (dim >= 0)[None, :]
    async_copy.async_copy_global_to_shared(copies, queries.start + at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def await_queries():
    """Wait until they are there."""
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _places(half: gl.constexpr, tile, kv_head, layer: gl.constexpr):
    """Of a warpgroup's queries: token and head, int [HALF], dimensions, and which there are."""
    lane = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, WIDE))
    token = tile.first + lane // layer.group
    exists = (lane < QUERIES // layer.group * layer.group) & (token < tile.end)
    return token.to(gl.int64), kv_head * layer.group + lane % layer.group, dim, exists


@gluon.jit
def score(queries, keys):
    """Begin to score a block."""
    none = gl.zeros([HALF, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(queries, keys.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def first_block(scores, shared, number, query_at, block, length, layer: gl.constexpr):
    """The weights of the first block to be attended to, with their sums and peaks.

    Of its keys only those at positions before ``length`` may exist.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, sums_layout(layer.head_dim), 2)
    stage = number % STAGES
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(shared.barriers.index(K_FREE + stage), count=1)
    total = gl.zeros([HALF], gl.float32, layout=ROW)
    peak = gl.full([HALF], LOWEST, gl.float32, layout=ROW)
    weights, total, peak, _ = _softmax(scores, total, peak, query_at, block, True, layer)
    weights = gl.convert_layout(weights.to(shared.k.dtype), LEFT)
    mbarrier.wait(shared.barriers.index(V_FULL + stage), (number // STAGES) & 1)
    if (block + 1) * KEYS > length:
        # Where nothing was written may be NaN, and 0 * NaN is NaN. Both warpgroups write the same.
        v = shared.v.index(stage).load(WIDE)
        key_at = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
        shared.v.index(stage).store(gl.where((key_at < length)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        debug_barrier()
    return weights, total, peak


@gluon.jit
def next_block(
    sums, weights, total, peak, queries, shared, number, query_at, block, MASKED: gl.constexpr, layer: gl.constexpr
):  # fmt: skip
    """Score a block, and add up the values of the block before, which has these weights."""
    stage = number % STAGES
    before = (number - 1) % STAGES
    parity = (number // STAGES) & 1
    mbarrier.wait(shared.barriers.index(K_FULL + stage), parity)
    scores = score(queries, shared.k.index(stage))
    sums = warpgroup_mma(weights, shared.v.index(before), sums, is_async=True)
    scores, sums = warpgroup_mma_wait(1, deps=(scores, sums))
    mbarrier.arrive(shared.barriers.index(K_FREE + stage), count=1)
    new, total, peak, fade = _softmax(scores, total, peak, query_at, block, MASKED, layer)
    # Waiting for the next step's values here, which is a loop, also keeps the assembler from moving
    # the wait for this step's sums ahead of the softmax.
    mbarrier.wait(shared.barriers.index(V_FULL + stage), parity)
    sums, new = warpgroup_mma_wait(0, deps=(sums, new))
    mbarrier.arrive(shared.barriers.index(V_FREE + before), count=1)
    sums = sums * gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))[:, None]
    weights = gl.convert_layout(new.to(weights.dtype), weights.type.layout)
    return sums, weights, total, peak


@gluon.jit
def _softmax(scores, total, peak, query_at, block, MASKED: gl.constexpr, layer: gl.constexpr):
    """Weights of a block, sum and peak of all so far, and what to multiply earlier sums by."""
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
def store(half: gl.constexpr, results, sums, total, tile, kv_head, layer: gl.constexpr):
    """Write what a warpgroup's queries attend to."""
    # Lanes of no query may have seen nothing.
    total = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, sums.type.layout))
    wide = gl.convert_layout((sums / total[:, None]).to(results.out.dtype.element_ty), WIDE)
    token, head, dim, exists = _places(half, tile, kv_head, layer)
    row = token * (layer.kv_heads * layer.group) + head
    mask = exists[:, None] & (dim >= 0)[None, :]
    gl.store(results.out + row[:, None] * layer.head_dim + dim[None, :], wide, mask=mask)


@gluon.jit
def store_piece(half: gl.constexpr, results, sums, total, peak, item, layer: gl.constexpr):
    """Write what ``add_up`` reads."""
    gl.store(results.partial + _partial_at(half, item, layer.head_dim), sums)
    stat = results.stats + item * (2 * QUERIES) + half * HALF + gl.arange(0, HALF, layout=ROW)
    gl.store(stat, total)
    gl.store(stat + QUERIES, peak)


@gluon.jit
def all_stored(half: gl.constexpr, results, pair, pieces):
    """Whether this piece is the last one of its tile to be stored."""
    # All threads have stored before one of them announces it.
    debug_barrier()
    arrival = results.arrivals + pair * 2 + half
    last = gl.atomic_add(arrival, 1, sem="acq_rel") == pieces - 1
    gl.store(arrival, 0, mask=last)
    return last


@gluon.jit
def add_up(half: gl.constexpr, results, first_item, pieces, layer: gl.constexpr):
    """Weighted values of all pieces, and the sums of their weights, in the order of the pieces."""
    stats = results.stats + half * HALF + gl.arange(0, HALF, layout=ROW)
    sums = gl.zeros([HALF, layer.head_dim], gl.float32, layout=sums_layout(layer.head_dim))
    total = gl.zeros([HALF], gl.float32, layout=ROW)
    peak = gl.full([HALF], LOWEST, gl.float32, layout=ROW)
    for item in range(first_item, first_item + pieces):
        stat = stats + item * (2 * QUERIES)
        piece_total = gl.load(stat, cache_modifier=".cg")
        piece_peak = gl.load(stat + QUERIES, cache_modifier=".cg")
        partial = results.partial + _partial_at(half, item, layer.head_dim)
        values = gl.load(partial, cache_modifier=".cg")
        new_peak = gl.maximum(peak, piece_peak)
        fade, gain = gl.exp2(peak - new_peak), gl.exp2(piece_peak - new_peak)
        total = total * fade + piece_total * gain
        fade = gl.convert_layout(fade, gl.SliceLayout(1, sums.type.layout))
        gain = gl.convert_layout(gain, gl.SliceLayout(1, sums.type.layout))
        sums = sums * fade[:, None] + values * gain[:, None]
        peak = new_peak
    return sums, total


@gluon.jit
def _partial_at(half: gl.constexpr, item, HEAD_DIM: gl.constexpr):
    lane = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums_layout(HEAD_DIM)))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, sums_layout(HEAD_DIM)))
    return (item * QUERIES + lane)[:, None] * HEAD_DIM + dim[None, :]
