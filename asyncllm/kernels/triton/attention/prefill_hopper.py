"""Prefill attention for Hopper GPUs, in Gluon, Triton's language of explicit layouts and copies.

After FlashAttention-3 (Shah et al., arXiv 2407.08608): a producer warp has the tensor memory
accelerator copy keys and values to shared memory, page by page; two warpgroups attend to them, 64
queries each; and while the tensor cores add up the values of one block and score the next one, the
other units compute the softmax in between. Grid: one program for each multiprocessor, which takes
tile after tile, and scores the first block of a tile while it writes the result of the previous
one. If there are fewer tiles than multiprocessors, the keys of each are cut into pieces (flash
decoding, Dao et al., 2023); their programs wait for each other, and each then adds up all pieces
for a share of the queries.

Measured on an H200 (docs/kernels.md): 600 TFLOP/s for 8,000 tokens, 94 to 96 % of FlashAttention-3
on contiguous keys, and a fifth less time for 512 tokens after 7,500. A tile costs 4 us beside the
1.8 us of each block of keys. Adding up pieces in all programs, not in the last one, saves up to 15
us of a short row. Rejected: fetching keys and tiles before the wait, which spills registers and
costs long rows 5 to 8 %; pieces of 67 to 131 tiles over several turns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.attention.hopper_8_bits import (
    convert,
    in_vectors,
    prepare_queries,
)
from asyncllm.kernels.triton.attention.prefill_hopper_parts import (
    HALF,
    K_FREE,
    K_FULL,
    QUERIES,
    ROW,
    STAGES,
    V_FREE,
    V_FULL,
    VECTORS,
    Layer,
    Queries,
    Results,
    Shared,
    Work,
    await_queries,
    blocks_of,
    item_of,
    load_queries,
    produce,
    sums_layout,
    tile_of,
)
from asyncllm.kernels.triton.attention.prefill_hopper_steps import (
    add_up,
    await_pieces,
    first_block,
    next_block,
    score,
    store,
    store_piece,
    take_sinks,
)
from asyncllm.kernels.triton.attention.prefill_tiles import KEYS, find_tiles
from asyncllm.kernels.triton.launch import Launcher, Scratch
from asyncllm.kernels.triton.page_copies import SHARED, can_copy, describe, shared_layout
from asyncllm.kernels.triton.waiting import max_waiting_programs
from asyncllm.kernels.types import AttentionSpec, PrefillRows


def supports(q: Tensor, keys: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernel can run on this GPU, with these types and sizes."""
    return (
        can_copy(keys, spec, KEYS.value)
        and keys.dtype in (q.dtype, torch.float8_e4m3fn)
        and q.itemsize == 2
        and spec.group <= QUERIES.value
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
    )


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """``kernels.attention.prefill_attention``, for arguments that ``supports`` accepts.

    Launches of one thread must follow each other on a stream.
    """
    group = spec.group
    programs = gpu_of(q.device).multiprocessors
    workspace = workspace_of(q.device, programs, spec.head_dim)
    room = max(max_waiting_programs(q.device) // spec.num_kv_heads, 1)
    tiles = find_tiles(rows, len(q), QUERIES.value // group, room)
    strides = (block_table.stride(0), q.stride(0), q.stride(1))
    k, v = describe(keys, KEYS.value), describe(values, KEYS.value)
    _launch(
        (programs, 1, 1),
        (q, k, v, scales, sinks, out, *workspace, block_table, tiles, *strides),
        (
            *(spec.scale, spec.softcap or 0.0, spec.window or 0),
            *(keys.shape[1], spec.num_kv_heads, group, spec.head_dim),
        ),
        num_warps=4,
    )
    return out


_scratch = Scratch()


def workspace_of(
    device: torch.device, programs: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``Results``' partial, stats and arrivals."""
    floats = _scratch.floats(programs * QUERIES.value * (2 + head_dim), device)
    stats = floats[programs * QUERIES.value * head_dim :]
    return floats, stats, _scratch.counters(2 * programs, device)


@gluon.jit(do_not_specialize=["table_stride"])
def _prefill(
    q,
    keys,
    values,
    scales,
    sinks,
    out,
    partial,
    stats,
    arrivals,
    block_table,
    tiles,
    table_stride,
    q_token_stride,
    q_head_stride,
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PDL: gl.constexpr,
):
    layer: gl.constexpr = Layer(SCALE, SOFTCAP, WINDOW, KV_HEADS, GROUP, HEAD_DIM)
    # 8-bit pages are multiplied as float16.
    dtype: gl.constexpr = q.dtype.element_ty if scales is None else gl.float16
    shared = Shared(
        gl.allocate_shared_memory(dtype, [4, HALF, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED),
        gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.barriers.index(K_FULL + i), count=1)
        mbarrier.init(shared.barriers.index(V_FULL + i), count=1)
        mbarrier.init(shared.barriers.index(K_FREE + i), count=2)
        mbarrier.init(shared.barriers.index(V_FREE + i), count=2)
    raw = shared
    if scales is not None:
        RAW: gl.constexpr = [1, KEYS, HEAD_DIM // 2]
        raw = Shared(
            shared.q,
            gl.allocate_shared_memory(gl.int16, RAW, shared_layout(HEAD_DIM // 2)),
            gl.allocate_shared_memory(gl.int16, RAW, shared_layout(HEAD_DIM // 2)),
            gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout()),
        )
        for i in gl.static_range(4 * STAGES):
            mbarrier.init(raw.barriers.index(i), count=1)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    pieces = gl.load(tiles + 1)
    work = Work(tiles, gl.load(tiles) * KV_HEADS * pieces, pieces)
    queries = Queries(q, sinks, scales, q_token_stride, q_head_stride)
    results = Results(out, partial, stats, arrivals)
    # Registers of a thread: few in warps that have no sums.
    if scales is None:
        gl.warp_specialize(
            [
                (_consume, (0, queries, results, shared, work, layer)),
                (_consume, (1, queries, results, shared, work, layer)),
                (produce, (keys, values, block_table, table_stride, raw, work, layer, PAGE_SIZE)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, queries, results, shared, work, layer)),
                (_consume, (1, queries, results, shared, work, layer)),
                (convert, (raw, shared, work, layer)),
                (produce, (keys, values, block_table, table_stride, raw, work, layer, PAGE_SIZE)),
            ],
            [4, 4, 1],
            [216, 48, 24],
        )


@gluon.jit
def _consume(half: gl.constexpr, queries, results, shared, work, layer: gl.constexpr):
    """Attend this half of the queries of all items."""
    item = item_of(0)
    pair = gl.minimum(item, work.items - 1) // work.pieces
    tile = tile_of(work, pair, layer)
    blocks = blocks_of(tile, item % work.pieces, work.pieces, layer)
    # An item without blocks is a program's only item: otherwise items are whole tiles.
    if (item < work.items) & (blocks.first <= blocks.last):
        load_queries(half, queries, shared.q.index(half), tile, pair % layer.kv_heads, layer)
        await_queries()
        units = _units(queries, shared.q.index(half), pair % layer.kv_heads)
        mbarrier.wait(shared.barriers.index(K_FULL), 0)
        scores = score(shared.q.index(half), shared.k.index(0))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        turn = 0
        number = 0  # of blocks so far
        while item < work.items:
            next_item = item_of(turn + 1)
            more = next_item < work.items
            next_pair = gl.where(more, next_item, item) // work.pieces
            next_tile = tile_of(work, next_pair, layer)
            mine = shared.q.index(turn % 2 * 2 + half)
            next_mine = shared.q.index((turn + 1) % 2 * 2 + half)
            next_head = next_pair % layer.kv_heads
            load_queries(half, queries, next_mine, next_tile, next_head, layer)

            blocks = blocks_of(tile, item % work.pieces, work.pieces, layer)
            sums, weights, total, peak, number = _attend(
                half, scores, units, mine, shared, number, tile, blocks, layer
            )

            # While the last values are added, score the first block of the next item, or, without
            # one, whatever is in shared memory.
            stage = number % STAGES
            before = (number - 1) % STAGES
            await_queries()
            units = _units(queries, next_mine, next_head)
            mbarrier.wait(shared.barriers.index(K_FULL + stage), (number // STAGES) & 1, pred=more)
            sums = warpgroup_mma(weights, shared.v.index(before), sums, is_async=True)
            scores = score(next_mine, shared.k.index(stage))
            sums, scores = warpgroup_mma_wait(1, deps=(sums, scores))
            mbarrier.arrive(shared.barriers.index(V_FREE + before), count=1)
            kv_head = pair % layer.kv_heads
            if queries.scales is not None:
                sums = sums * gl.load(queries.scales + layer.kv_heads + kv_head)
            if queries.sinks is not None:
                # In the first piece alone, or they would count several times.
                counts = item % work.pieces == 0
                sums, total, peak = take_sinks(
                    half, sums, total, peak, queries.sinks, kv_head, counts, layer
                )
            if blocks.pieces == 1:
                # Lanes without a query may have a total of 0.
                of_sums: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
                divisor = gl.convert_layout(gl.maximum(total, 1e-30), of_sums)
                result = (sums / divisor[:, None]).to(results.out.dtype.element_ty)
                if queries.scales is not None:
                    result = in_vectors(result, mine)
                else:
                    result = gl.convert_layout(result, VECTORS)
                store(half, results, result, tile, kv_head, layer)
            else:
                store_piece(half, results, sums, total, peak, item, layer)
                await_pieces(half, results, pair, blocks.pieces)
                piece = item % work.pieces
                add_up(half, results, item - piece, piece, blocks.pieces, tile, kv_head, layer)
            tile = next_tile
            pair = next_pair
            item = next_item
            turn += 1
        scores = warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _units(queries, copies, kv_head):
    """What one is in the scores of a warpgroup's queries, ([HALF],); nothing if it is one."""
    units = ()
    if queries.scales is not None:
        unit = prepare_queries(copies, queries.start.dtype.element_ty)
        units = (unit * gl.load(queries.scales + kv_head),)  # type: ignore[assignment]
    return units


@gluon.jit
def _attend(
    half: gl.constexpr, scores, units, mine, shared, number, tile, blocks, layer: gl.constexpr
):
    """Attend to all blocks except for the values of the last one, whose weights are returned.

    Args:
        scores: of the first block, being computed.
        number: of blocks so far.
    """
    query_at = (
        tile.first + tile.shift + (half * HALF + gl.arange(0, HALF, layout=ROW)) // layer.group
    )
    weights, total, peak = first_block(
        scores, units, shared, number, query_at, blocks.last, tile.length, layer
    )
    sums = gl.zeros([HALF, layer.head_dim], gl.float32, layout=sums_layout(layer.head_dim))
    number += 1
    block = blocks.last - 1
    while block >= gl.maximum(blocks.hidden, blocks.first):
        sums, weights, total, peak = next_block(
            sums, weights, total, peak, units, mine, shared, number, query_at, block, True, layer
        )
        number += 1
        block -= 1
    while block >= blocks.first:
        sums, weights, total, peak = next_block(
            sums, weights, total, peak, units, mine, shared, number, query_at, block, False, layer
        )
        number += 1
        block -= 1
    return sums, weights, total, peak, number


_launch = Launcher(_prefill)
