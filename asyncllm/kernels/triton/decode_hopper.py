"""Decode attention of many rows for Hopper GPUs, in Gluon.

Cut and added up as in ``decode``, with fewer instructions: reading K and V takes all of the power
that a GPU may draw, so whatever else draws some takes time. One warp has the tensor memory
accelerator copy pages to shared memory, from where the tensor cores take both operands: tokens, or
the dimensions of values, are the 64 rows that a product has at least, and the query heads of a
group its 8 or 16 columns. Softmax is that of a column.

On an H200 at its limit of power, bfloat16, 8 K/V heads of 128, 32 query heads, rows of 100 to 1,400
tokens: microseconds, alone, and with the products of a layer of Qwen3-8B. Predicted were 3 % less
with the products, from half of the instructions of a tile.

| rows | alone | ``decode`` | TB/s | with products | ``decode`` |
|------|-------|------------|------|---------------|------------|
| 96   | 73.6  | 76.4       | 4.04 | 199.8         | 201.1      |
| 160  | 121.6 | 125.4      | 4.16 | 266.6         | 269.6      |
| 224  | 169.7 | 173.9      | 4.25 | 365.0         | 368.5      |

Two stages are as fast, one, or 128 tokens at a time, slower by 1 to 4 %. Fewer rows, alone, whole
or in up to so many pieces of at least so many tokens; the floor is 4.5 TB/s:

| rows | floor | ``decode`` | whole | 2 of 512 | 4 of 256 | 8 of 128 |
|------|-------|------------|-------|----------|----------|----------|
| 16   | 11.3  | 17.8       | 17.4  | 16.0     | 18.0     | 22.3     |
| 24   | 15.2  | 24.0       | 21.3  | 22.2     | 24.6     | 30.0     |
| 32   | 21.6  | 31.6       | 26.2  | 28.4     | 31.5     | 39.8     |
| 48   | 33.9  | 43.0       | 40.2  | 40.0     | 44.5     | 56.4     |
| 64   | 44.5  | 55.1       | 50.9  | 51.7     | 57.0     | 71.5     |

Programs that find nothing to do cost next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_wait

from asyncllm.kernels.triton.decode_cuts import (
    MANY_PAIRS,
    MAX_PROGRAMS,
    fitting_splits,
    workspace_of,
)
from asyncllm.kernels.triton.decode_hopper_parts import (
    K_FREE,
    K_FULL,
    STAGES,
    TILE,
    V_FREE,
    V_FULL,
    Heads,
    Shared,
    heads_layout,
    piece_of,
    produce,
    products_layout,
    tiles_of,
)
from asyncllm.kernels.triton.decode_pieces import LOG2_E, LOWEST
from asyncllm.kernels.triton.launch import Launcher
from asyncllm.kernels.triton.page_copies import SHARED, can_copy, describe

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.attention.base import AttentionSpec

MAX_GROUP = 16
#: Rows times K/V heads that ``decode`` is as fast for.
FEW_PAIRS = 128


def supports(q: Tensor, keys: Tensor, spec: AttentionSpec) -> bool:
    """Whether this is what the kernel is written for, and so many rows that it is faster."""
    return (
        len(q) * spec.num_kv_heads > FEW_PAIRS
        and can_copy(keys, spec, TILE.value)
        and q.dtype == keys.dtype
        and spec.num_heads // spec.num_kv_heads <= MAX_GROUP
        and spec.window is None
        and spec.softcap is None
    )


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    *,
    out: Tensor,
    beside: bool = False,
    splits: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """See ``kernels.decode.decode_attention``; for what ``supports`` approves of.

    Args:
        splits, chunk: as in ``Cut``, ``chunk`` a multiple of TILE; by default as is best.
    """
    group = spec.num_heads // spec.num_kv_heads
    page_size = keys.shape[1]
    if splits is None or chunk is None:
        splits, chunk = choose_pieces(len(q), spec, block_table.shape[1] * page_size)
    boxes = describe(keys, TILE.value), describe(values, TILE.value)
    args = (
        *(q, q.stride(0), q.stride(1), keys, values, *boxes, block_table, slots, lengths),
        *(out, *workspace_of(q.device, len(q), spec, splits)),
        *(block_table.stride(0), splits, chunk),
    )
    columns = 8 if group <= 8 else MAX_GROUP
    constants = (spec.scale, page_size, spec.num_kv_heads, group, spec.head_dim, columns, beside)
    _launch((spec.num_kv_heads, splits, len(q) + beside), args, constants, num_warps=4)
    return out


def choose_pieces(rows: int, spec: AttentionSpec, max_length: int) -> tuple[int, int]:
    """``splits`` and ``chunk`` for so many rows of up to ``max_length`` tokens.

    Only what is very long is cut, lest all wait for it.
    """
    pairs = rows * spec.num_kv_heads
    splits, chunk = (8, 1024) if pairs <= MANY_PAIRS else (MAX_PROGRAMS // pairs, 4096)
    return fitting_splits(splits, chunk, max_length), chunk


class Memory(NamedTuple):
    """Global memory; see ``kernels.decode`` and ``Workspace``."""

    q: Any
    q_row_stride: Any
    q_head_stride: Any
    k: Any
    v: Any
    out: Any
    partial: Any
    stats: Any
    arrivals: Any
    splits: Any


# What there is of each row is often a slice of an upload, which starts anywhere.
@gluon.jit(
    do_not_specialize=["table_stride", "splits", "chunk"],
    do_not_specialize_on_alignment=["slots", "lengths"],
)
def _decode_hopper(
    q,
    q_row_stride,
    q_head_stride,
    keys,
    values,
    key_boxes,
    value_boxes,
    block_table,
    slots,
    lengths,
    out,
    partial,
    stats,
    arrivals,
    table_stride,
    splits,
    chunk,
    SCALE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    COLUMNS: gl.constexpr,
    BESIDE: gl.constexpr,
    PDL: gl.constexpr,
):
    heads: gl.constexpr = Heads(SCALE, PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM, COLUMNS)
    if BESIDE and gl.program_id(2) == gl.num_programs(2) - 1:
        # One row too many: it keeps whoever waits for this kernel waiting for the one beside, too.
        gdc_wait()
        return
    piece, exists, is_row = piece_of(lengths, slots, block_table, table_stride, splits, chunk)
    # Of padding there is a result as well, unless it is somebody else's.
    if not exists or (BESIDE and not is_row):
        return
    memory = Memory(
        q, q_row_stride, q_head_stride, keys, values, out, partial, stats, arrivals, splits
    )
    dtype: gl.constexpr = q.dtype.element_ty
    shared = Shared(
        gl.allocate_shared_memory(dtype, [COLUMNS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(dtype, [COLUMNS, TILE], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(shared.barriers.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (memory, piece, shared, heads, BESIDE)),
            (produce, (key_boxes, value_boxes, piece, shared, heads)),
        ],
        [1],
        [40],
    )


#: So that two programs fit on a multiprocessor.
_launch = Launcher(_decode_hopper, max_registers=128)


@gluon.jit
def _consume(memory, piece, shared, heads: gl.constexpr, BESIDE: gl.constexpr):
    """Attend to a piece, and write what comes out."""
    LAYOUT: gl.constexpr = heads_layout(heads.head_dim)
    # Up to here nothing was read that the kernels before this write.
    if not BESIDE:
        gdc_wait()
    sums, totals, peak = _begin(memory, piece, shared, heads)
    for number in range(tiles_of(piece)):
        sums, totals, peak = _attend(sums, totals, peak, shared, piece, number, heads)
    sums = gl.convert_layout(gl.permute(sums, (1, 0)), LAYOUT)
    total = gl.convert_layout(gl.sum(totals, 0), gl.SliceLayout(1, LAYOUT))
    peak = gl.convert_layout(peak, gl.SliceLayout(1, LAYOUT))
    _finish(sums, total, peak, memory, piece, heads)


@gluon.jit
def _begin(memory, piece, shared, heads: gl.constexpr):
    """Copy the queries to shared memory, and take the newest token, if it goes with this piece.

    The kernels before this have written it, so it is in none of the tiles, which may come sooner.

    Returns:
        sums [head_dim, columns], totals [TILE, columns] and peak [columns] of the softmax; what
        there is of the total at each place of a tile, so that threads keep it to themselves.
    """
    LAYOUT: gl.constexpr = heads_layout(heads.head_dim)
    PRODUCTS: gl.constexpr = products_layout(heads.columns)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    head = gl.arange(0, heads.columns, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, heads.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    at = memory.q + piece.row * memory.q_row_stride
    at += (piece.kv_head * heads.group + head)[:, None] * memory.q_head_stride + dim[None, :]
    queries = gl.load(at, mask=(head < heads.group)[:, None] & (dim >= 0)[None, :], other=0.0)
    shared.q.store(queries)

    exists = piece.newest >= 0
    newest = gl.maximum(piece.newest, 0)
    page = gl.load(piece.table + newest // heads.page_size)
    cell = page.to(gl.int64) * heads.page_size + newest % heads.page_size
    cell = (cell * heads.kv_heads + piece.kv_head) * heads.head_dim
    key = gl.load(memory.k + cell + dim, mask=(dim >= 0) & exists, other=0.0)
    scores = gl.sum(queries.to(gl.float32) * key.to(gl.float32)[None, :], 1)
    scores = gl.convert_layout(scores, COLUMN) * (heads.scale * LOG2_E)
    lowest = gl.full([heads.columns], LOWEST, gl.float32, layout=COLUMN)
    peak = gl.where(exists, scores, lowest)
    dim = gl.arange(0, heads.head_dim, layout=gl.SliceLayout(1, PRODUCTS))
    value = gl.load(memory.v + cell + dim, mask=(dim >= 0) & exists, other=0.0)
    sums = gl.zeros([heads.head_dim, heads.columns], gl.float32, layout=PRODUCTS)
    sums += value.to(gl.float32)[:, None]
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    none = gl.zeros([TILE, heads.columns], gl.float32, layout=PRODUCTS)
    totals = gl.where(((place == 0) & exists)[:, None], none + 1.0, none)
    fence_async_shared()
    debug_barrier()  # all threads have stored their queries
    return sums, totals, peak


@gluon.jit
def _attend(sums, totals, peak, shared, piece, number, heads: gl.constexpr):
    """Take a tile, the one of this number, into the softmax."""
    PRODUCTS: gl.constexpr = products_layout(heads.columns)
    stage = number % STAGES
    parity = (number // STAGES) & 1
    none = gl.zeros([TILE, heads.columns], gl.float32, layout=PRODUCTS)
    mbarrier.wait(shared.barriers.index(K_FULL + stage), parity)
    q = shared.q.permute((1, 0))
    scores = warpgroup_mma(shared.k.index(stage), q, none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(shared.barriers.index(K_FREE + stage), count=1)
    scores *= heads.scale * LOG2_E
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
    mbarrier.wait(shared.barriers.index(V_FULL + stage), parity)
    if count < TILE:
        _clear(shared.v.index(stage), count, heads)
    fence_async_shared()
    debug_barrier()  # all threads have stored their weights
    v = shared.v.index(stage).permute((1, 0))
    sums = warpgroup_mma(v, p, sums * fade[None, :], is_async=True)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(shared.barriers.index(V_FREE + stage), count=1)
    return sums, totals, new_peak


@gluon.jit
def _clear(values, count, heads: gl.constexpr):
    """Keep so many of a tile: where nothing was written may be NaN, and 0 * NaN is NaN."""
    LAYOUT: gl.constexpr = heads_layout(heads.head_dim)
    token = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    v = values.load(LAYOUT)
    values.store(gl.where((token < count)[:, None], v, gl.zeros_like(v)))


@gluon.jit
def _finish(sums, total, peak, memory, piece, heads: gl.constexpr):
    """Write the result of a row's only piece, or add it up if this is the last piece to arrive."""
    LAYOUT: gl.constexpr = heads_layout(heads.head_dim)
    SIZE: gl.constexpr = heads.group * heads.head_dim
    head = gl.arange(0, heads.columns, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, heads.head_dim, layout=gl.SliceLayout(0, LAYOUT))
    at = head[:, None] * heads.head_dim + dim[None, :]
    exists = head < heads.group
    inside = exists[:, None] & (dim >= 0)[None, :]
    pair = piece.row * heads.kv_heads + piece.kv_head
    out = memory.out + pair * SIZE + at
    if piece.pieces > 1:
        first = pair * memory.splits
        partial = memory.partial + first * SIZE + at
        stats = memory.stats + first * (2 * heads.group) + head
        stat = stats + piece.number * (2 * heads.group)
        gl.store(partial + piece.number * SIZE, sums, mask=inside)
        gl.store(stat, peak, mask=exists)
        gl.store(stat + heads.group, total, mask=exists)
        debug_barrier()  # all threads have stored before one of them announces it
        arrived = gl.atomic_add(memory.arrivals + pair, 1, sem="acq_rel") + 1
        if arrived == piece.pieces:
            gl.store(memory.arrivals + pair, 0)
            sums, total = _add_up(partial, stats, piece.pieces, inside, exists, heads)
            _store(out, sums, total, inside)
    else:
        _store(out, sums, total, inside)


@gluon.jit
def _add_up(partial, stats, pieces, inside, exists, heads: gl.constexpr):
    """Sums and total of all pieces of a row, taken in their order."""
    LAYOUT: gl.constexpr = heads_layout(heads.head_dim)
    LANE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    sums = gl.zeros([heads.columns, heads.head_dim], gl.float32, layout=LAYOUT)
    total = gl.zeros([heads.columns], gl.float32, layout=LANE)
    peak = gl.full([heads.columns], LOWEST, gl.float32, layout=LANE)
    for number in range(pieces):
        stat = stats + number * (2 * heads.group)
        at = partial + number * (heads.group * heads.head_dim)
        its_peak = gl.load(stat, mask=exists, other=LOWEST, cache_modifier=".cg")
        its_total = gl.load(stat + heads.group, mask=exists, other=0.0, cache_modifier=".cg")
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
    # The total of padding is 0.
    total = gl.maximum(total, 1e-30)
    gl.store(out, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


__all__ = ["decode_attention", "supports"]
