"""Data of ``prefill_hopper``: constants, memory, tiles, and the copies to shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import debug_barrier

from asyncllm.kernels.triton.attention.prefill_tiles import FIELDS, KEYS, MIN_BLOCKS
from asyncllm.kernels.triton.page_copies import copy_block, find_cells

#: Queries (times heads of a group) of a warpgroup, and of both; blocks in shared memory.
HALF = gl.constexpr(64)
QUERIES = gl.constexpr(128)
STAGES = gl.constexpr(2)

#: The barriers of each stage: K or V has arrived, or both warpgroups have used it.
K_FULL, V_FULL, K_FREE, V_FREE = (gl.constexpr(i * STAGES.value) for i in range(4))

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
#: The layout of tensors in global memory: 16 bytes for each thread.
VECTORS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Layer(NamedTuple):
    """Constants of a layer; softcap and window are 0 if there is none."""

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
    """All items of a launch: a piece of a tile for a K/V head each, ``pieces`` for each tile."""

    tiles: Any
    items: Any
    pieces: Any


class Queries(NamedTuple):
    """Queries in global memory, and the strides of tokens and heads; the heads' sinks and the
    scales of 8-bit pages, or None."""

    start: Any
    sinks: Any
    scales: Any
    token_stride: Any
    head_stride: Any


class Results(NamedTuple):
    """Global memory for results, and for pieces until they are added up.

    Attributes:
        partial: float32 [items, QUERIES, head_dim]; weighted values.
        stats: float32 [items, 2, QUERIES]; sum and peak of the weights.
        arrivals: int32 [2 * tiles * kv_heads]; zeros before and after.
    """

    out: Any
    partial: Any
    stats: Any
    arrivals: Any


class Tile(NamedTuple):
    """See ``prefill_tiles.find_tiles``."""

    first: Any
    end: Any
    shift: Any
    slot: Any
    length: Any


class Blocks(NamedTuple):
    """Blocks of keys of a piece.

    Attributes:
        hidden: the first block of which some query does not see every key.
        pieces: of the tile, not counting those without blocks.
    """

    first: Any
    last: Any
    hidden: Any
    pieces: Any


@gluon.constexpr_function
def sums_layout(head_dim: int) -> gl.NVMMADistributedLayout:
    """The layout of sums of weighted values, [HALF, head_dim]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])


@gluon.jit
def item_of(turn):
    """The item of this program in a turn.

    The longest tiles come first, and turns go over the programs back and forth, so that all
    programs get about equal work.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def tile_of(work, pair, layer: gl.constexpr):
    """The tile of a pair of tile and K/V head."""
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
    """The blocks of a piece; if it has none, ``last`` is ``first - 1``."""
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
    keys,
    values,
    block_table,
    table_stride,
    shared,
    work,
    layer: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Request the blocks of all items, each from the last to the first, as stages become free."""
    COPIED: gl.constexpr = keys.block_type.shape[0]
    RING: gl.constexpr = shared.k.shape[0]
    turn = 0
    number = 0
    item = item_of(turn)
    while item < work.items:
        pair = item // work.pieces
        tile = tile_of(work, pair, layer)
        blocks = blocks_of(tile, item % work.pieces, work.pieces, layer)
        table = block_table + tile.slot.to(gl.int64) * table_stride
        column = pair % layer.kv_heads * shared.k.shape[2]
        for i in range(blocks.last - blocks.first + 1):
            start = (blocks.last - i) * KEYS
            cells = find_cells(table, start, tile.length, KEYS, COPIED, PAGE_SIZE)
            stage = number % RING
            parity = (number // RING + 1) & 1
            mbarrier.wait(shared.barriers.index(K_FREE + stage), parity)
            full = shared.barriers.index(K_FULL + stage)
            copy_block(keys, cells, column, shared.k, stage, full)
            mbarrier.wait(shared.barriers.index(V_FREE + stage), parity)
            full = shared.barriers.index(V_FULL + stage)
            copy_block(values, cells, column, shared.v, stage, full)
            number += 1
        turn += 1
        item = item_of(turn)


@gluon.jit
def load_queries(half: gl.constexpr, queries, copies, tile, kv_head, layer: gl.constexpr):
    """Begin to copy a warpgroup's queries to shared memory."""
    token, head, dim, exists = places_of(half, tile, kv_head, layer)
    at = (token * queries.token_stride + head * queries.head_stride)[:, None] + dim[None, :]
    mask = exists[:, None] & (dim >= 0)[None, :]
    async_copy.async_copy_global_to_shared(copies, queries.start + at, mask=mask)
    async_copy.commit_group()


@gluon.jit
def await_queries():
    """Wait until the queries have arrived."""
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()


@gluon.jit
def places_of(half: gl.constexpr, tile, kv_head, layer: gl.constexpr):
    """Token, head (int [HALF]), dimensions and existence of a warpgroup's queries."""
    lane = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, VECTORS))
    dim = gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, VECTORS))
    token = tile.first + lane // layer.group
    exists = (lane < QUERIES // layer.group * layer.group) & (token < tile.end)
    return token.to(gl.int64), kv_head * layer.group + lane % layer.group, dim, exists
