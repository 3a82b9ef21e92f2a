"""``extend_attention`` for Hopper GPUs, in Gluon, Triton's language of explicit layouts and copies.

What it takes to come close to an H100's peak, after FlashAttention-3 (Shah et al., arXiv
2407.08608): one warp does nothing but have the tensor memory accelerator copy keys and values to
shared memory, page by page; two warpgroups attend to them, 64 queries each; and while tensor cores
add up the values of one block and score the next, the other units take the softmax of the one in
between. One program for each multiprocessor takes tile after tile: it scores the first block of a
tile while it writes the result of the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.extend_tiles import FIELDS

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.attention.base import AttentionSpec
    from asyncllm.kernels.extend import ExtendRows

LOG2_E = gl.constexpr(1.4426950408889634)
#: Below any score, yet finite: the difference of two is no NaN.
LOWEST = gl.constexpr(-1e30)

#: Queries of a warpgroup, times the heads that share them, and of a program; keys of a block;
#: blocks of keys and of values that shared memory holds.
HALF = gl.constexpr(64)
QUERIES = gl.constexpr(128)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
#: Elements of 128 bytes, which is how wide a copy to shared memory can be.
SPAN = gl.constexpr(64)
HEAD_DIMS = (64, 128)

#: Barriers, of each stage one: keys or values have been copied, have been read by both warpgroups.
K_FULL, V_FULL, K_FREE, V_FREE = (gl.constexpr(i * STAGES.value) for i in range(4))

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
#: For tensors in global memory: 16 bytes of each thread.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.constexpr_function
def _sums(head_dim: int) -> gl.NVMMADistributedLayout:
    """Of sums of weighted values, [HALF, head_dim]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])


def supports(q: Tensor, keys: Tensor, spec: AttentionSpec) -> bool:
    """Whether this GPU, these types and these sizes are those that the kernel is written for."""
    page_size = keys.shape[1]
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in (torch.bfloat16, torch.float16)
        and spec.head_dim in HEAD_DIMS
        and page_size % 16 == 0
        and (KEYS.value % page_size == 0 or page_size % KEYS.value == 0)
        and spec.num_heads // spec.num_kv_heads <= QUERIES.value
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
    )


def extend_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: ExtendRows,
    spec: AttentionSpec,
    *,
    out: Tensor,
) -> Tensor:
    """See ``kernels.extend.extend_attention``; for what ``supports`` approves of."""
    group = spec.num_heads // spec.num_kv_heads
    page_size = keys.shape[1]
    copied = min(page_size, KEYS.value)
    k, v = (
        TensorDescriptor.from_tensor(
            pages.view(-1, spec.num_kv_heads * spec.head_dim), [copied, SPAN.value], SHARED.value
        )
        for pages in (keys, values)
    )
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    _extend[programs,](
        q,
        k,
        v,
        out,
        block_table,
        rows.tiles(len(q), QUERIES.value // group),
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        SCALE=spec.scale,
        SOFTCAP=spec.softcap or 0.0,
        WINDOW=spec.window or 0,
        PAGE_SIZE=page_size,
        COPIED=copied,
        KV_HEADS=spec.num_kv_heads,
        GROUP=group,
        HEAD_DIM=spec.head_dim,
        num_warps=4,
        launch_pdl=True,
    )
    return out


@gluon.jit(do_not_specialize=["table_stride"])
def _extend(
    q,
    keys,
    values,
    out,
    block_table,
    tiles,
    table_stride,
    q_token_stride,
    q_head_stride,
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    COPIED: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    # Queries of this turn and of the next, by warpgroup.
    q_shared = gl.allocate_shared_memory(dtype, [4, HALF, HEAD_DIM], SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_DIM], SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(K_FULL + i), count=1)
        mbarrier.init(barriers.index(V_FULL + i), count=1)
        mbarrier.init(barriers.index(K_FREE + i), count=2)
        mbarrier.init(barriers.index(V_FREE + i), count=2)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    count = gl.load(tiles) * KV_HEADS
    shared = (q_shared, k_shared, v_shared, barriers)
    work = (tiles, count)
    queries = (q, q_token_stride, q_head_stride)
    gl.warp_specialize(
        [
            (_consume, (0, queries, out, shared, work, SCALE, SOFTCAP, WINDOW, KV_HEADS, GROUP, HEAD_DIM)),
            (_consume, (1, queries, out, shared, work, SCALE, SOFTCAP, WINDOW, KV_HEADS, GROUP, HEAD_DIM)),
            (_produce, (keys, values, block_table, table_stride, shared, work, WINDOW, PAGE_SIZE, COPIED, KV_HEADS, HEAD_DIM)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _item(turn):
    """What this program attends in that turn: a tile, and a K/V head, as one number.

    The longest tiles come first. Programs go over them back and forth, so that all get equal shares.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _tile(tiles, item, KV_HEADS: gl.constexpr):
    """First token, token behind the last, and what to add to a token for its position."""
    entry = tiles + (1 + item // KV_HEADS) * FIELDS
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _blocks(first, end, shift, WINDOW: gl.constexpr):
    """The first and the last block of keys that a tile sees, and the first that needs a mask."""
    begin = 0
    masked = (first + shift + 1) // KEYS
    if WINDOW > 0:
        begin = gl.maximum(first + shift + 1 - WINDOW, 0) // KEYS
        masked = begin
    return begin, (end + shift - 1) // KEYS, masked


@gluon.jit
def _produce(
    keys,
    values,
    block_table,
    table_stride,
    shared,
    work,
    WINDOW: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    COPIED: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Copy the blocks of all items, each from its last to its first, as stages become free."""
    q_shared, k_shared, v_shared, barriers = shared
    tiles, count = work
    turn = 0
    number = 0
    item = _item(0)
    while item < count:
        first, end, shift = _tile(tiles, item, KV_HEADS)
        slot = gl.load(tiles + (1 + item // KV_HEADS) * FIELDS + 3)
        table = block_table + slot.to(gl.int64) * table_stride
        column = item % KV_HEADS * HEAD_DIM
        begin, last, masked = _blocks(first, end, shift, WINDOW)
        for i in range(last - begin + 1):
            cells = ()
            for part in gl.static_range(KEYS // COPIED):
                # There may be no page behind that of the last position, which is read instead.
                at = gl.minimum((last - i) * KEYS + part * COPIED, end + shift - 1)
                page = gl.load(table + at // PAGE_SIZE)
                cells = cells + (page * PAGE_SIZE + at % PAGE_SIZE // COPIED * COPIED,)
            stage = number % STAGES
            parity = (number // STAGES + 1) & 1
            mbarrier.wait(barriers.index(K_FREE + stage), parity)
            _copy(keys, cells, column, k_shared, stage, barriers.index(K_FULL + stage), HEAD_DIM)
            mbarrier.wait(barriers.index(V_FREE + stage), parity)
            _copy(values, cells, column, v_shared, stage, barriers.index(V_FULL + stage), HEAD_DIM)
            number += 1
        turn += 1
        item = _item(turn)


@gluon.jit
def _copy(pages, cells, column, shared, stage, full, HEAD_DIM: gl.constexpr):
    """Have a block copied from where its parts begin in ``pages``."""
    COPIED: gl.constexpr = pages.block_type.shape[0]
    PARTS: gl.constexpr = KEYS // COPIED
    SPANS: gl.constexpr = HEAD_DIM // SPAN
    # In shared memory all rows of the first 128 bytes lie before those of the next.
    tiles = shared._reinterpret(shared.dtype, [STAGES * SPANS * PARTS, COPIED, SPAN], SHARED)
    mbarrier.expect(full, KEYS * HEAD_DIM * 2)
    for part in gl.static_range(PARTS):
        for span in gl.static_range(SPANS):
            tma.async_copy_global_to_shared(
                pages,
                [cells[part], column + span * SPAN],
                full,
                tiles.index((stage * SPANS + span) * PARTS + part),
            )


@gluon.jit
def _consume(
    half: gl.constexpr,
    queries,
    out,
    shared,
    work,
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Attend this half of the queries of all items."""
    q_shared, k_shared, v_shared, barriers = shared
    tiles, count = work
    item = _item(0)
    if item < count:
        first, end, shift = _tile(tiles, item, KV_HEADS)
        _load_queries(half, queries, q_shared.index(half), first, end, item % KV_HEADS, GROUP, HEAD_DIM)  # fmt: skip
        scores = _score_first(q_shared.index(half), k_shared, barriers, 0, True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        turn = 0
        number = 0  # of blocks so far
        while item < count:
            next_item = _item(turn + 1)
            more = next_item < count
            next_first, next_end, next_shift = _tile(tiles, gl.where(more, next_item, item), KV_HEADS)  # fmt: skip
            mine = q_shared.index(turn % 2 * 2 + half)
            next_mine = q_shared.index((turn + 1) % 2 * 2 + half)
            _load_queries(half, queries, next_mine, next_first, next_end, next_item % KV_HEADS, GROUP, HEAD_DIM)  # fmt: skip

            begin, last, masked = _blocks(first, end, shift, WINDOW)
            query_at = first + shift + (half * HALF + gl.arange(0, HALF, layout=ROW)) // GROUP
            p, total, peak = _first_block(
                scores, shared, number, query_at, last, end + shift, SCALE, SOFTCAP, WINDOW, HEAD_DIM
            )  # fmt: skip
            acc = gl.zeros([HALF, HEAD_DIM], gl.float32, layout=_sums(HEAD_DIM))
            number += 1
            block = last - 1
            while block >= gl.maximum(masked, begin):
                acc, p, total, peak = _step(
                    acc, p, total, peak, mine, shared, number, query_at, block, True, SCALE, SOFTCAP, WINDOW
                )  # fmt: skip
                number += 1
                block -= 1
            while block >= begin:
                acc, p, total, peak = _step(
                    acc, p, total, peak, mine, shared, number, query_at, block, False, SCALE, SOFTCAP, WINDOW
                )  # fmt: skip
                number += 1
                block -= 1

            stage = (number - 1) % STAGES
            acc = warpgroup_mma(p, v_shared.index(stage), acc, is_async=True)
            scores = _score_first(next_mine, k_shared, barriers, number, more)
            acc, scores = warpgroup_mma_wait(1, deps=(acc, scores))
            mbarrier.arrive(barriers.index(V_FREE + stage), count=1)
            _store(half, out, acc, total, first, end, item % KV_HEADS, KV_HEADS, GROUP, HEAD_DIM)
            first, end, shift = next_first, next_end, next_shift
            item = next_item
            turn += 1
        scores = warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _places(half: gl.constexpr, first, end, kv_head, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Of a warpgroup's queries: token and head [HALF], dimensions, and which of these exist."""
    lane = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    token = first + lane // GROUP
    exists = (lane < QUERIES // GROUP * GROUP) & (token < end)
    return token.to(gl.int64), kv_head * GROUP + lane % GROUP, dim, exists


@gluon.jit
def _load_queries(
    half: gl.constexpr, queries, mine, first, end, kv_head, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr
):
    """Begin to copy them to shared memory."""
    q, token_stride, head_stride = queries
    token, head, dim, exists = _places(half, first, end, kv_head, GROUP, HEAD_DIM)
    at = (token * token_stride + head * head_stride)[:, None] + dim[None, :]
    async_copy.async_copy_global_to_shared(mine, q + at, mask=exists[:, None] & (dim >= 0)[None, :])
    async_copy.commit_group()


@gluon.jit
def _score_first(mine, k_shared, barriers, number, more):
    """Begin to score the first block of an item, once its queries and keys are there.

    Without an item (``more`` is false) whatever is there is scored, to no effect.
    """
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()
    stage = number % STAGES
    mbarrier.wait(barriers.index(K_FULL + stage), (number // STAGES) & 1, pred=more)
    return _score(mine, k_shared.index(stage))


@gluon.jit
def _score(mine, k):
    none = gl.zeros([HALF, KEYS], gl.float32, layout=SCORES)
    return warpgroup_mma(mine, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _first_block(
    scores, shared, number, query_at, block, stop,
    SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """The weights of an item's last block, its first to be attended to, of which only the keys at
    positions before ``stop`` may exist."""
    q_shared, k_shared, v_shared, barriers = shared
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _sums(HEAD_DIM), 2)
    stage = number % STAGES
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(barriers.index(K_FREE + stage), count=1)
    total = gl.zeros([HALF], gl.float32, layout=ROW)
    peak = gl.full([HALF], LOWEST, gl.float32, layout=ROW)
    weights, total, peak, fade = _softmax(
        scores, total, peak, query_at, block, True, SCALE, SOFTCAP, WINDOW
    )
    p = gl.convert_layout(weights.to(k_shared.dtype), LEFT)
    mbarrier.wait(barriers.index(V_FULL + stage), (number // STAGES) & 1)
    if (block + 1) * KEYS > stop:
        # Where nothing was written may be NaN, and 0 * NaN is NaN. Both warpgroups write the same.
        v = v_shared.index(stage).load(WIDE)
        key_at = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
        v_shared.index(stage).store(gl.where((key_at < stop)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        debug_barrier()
    return p, total, peak


@gluon.jit
def _step(
    acc, p, total, peak, mine, shared, number, query_at, block,
    MASKED: gl.constexpr, SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Score a block and add up the values of the one before it; ``p`` is the latter's weights."""
    q_shared, k_shared, v_shared, barriers = shared
    stage = number % STAGES
    before = (number - 1) % STAGES
    parity = (number // STAGES) & 1
    mbarrier.wait(barriers.index(K_FULL + stage), parity)
    scores = _score(mine, k_shared.index(stage))
    acc = warpgroup_mma(p, v_shared.index(before), acc, is_async=True)
    scores, acc = warpgroup_mma_wait(1, deps=(scores, acc))
    mbarrier.arrive(barriers.index(K_FREE + stage), count=1)
    weights, total, peak, fade = _softmax(
        scores, total, peak, query_at, block, MASKED, SCALE, SOFTCAP, WINDOW
    )
    # Waiting for the next step's values here, in a loop of its own, also keeps the assembler from
    # moving the wait for this step's sum ahead of the softmax.
    mbarrier.wait(barriers.index(V_FULL + stage), parity)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(barriers.index(V_FREE + before), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    return acc, p, total, peak


@gluon.jit
def _softmax(
    scores, total, peak, query_at, block,
    MASKED: gl.constexpr, SCALE: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Weights of a block, with sum and peak so far, and what to multiply earlier sums by."""
    factor: gl.constexpr = (SCALE if SOFTCAP == 0 else 1.0) * LOG2_E
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        scores = SOFTCAP * (1 - 2 / (1 + gl.exp2(scores * (2 * LOG2_E * SCALE / SOFTCAP))))
    if MASKED:
        key_at = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        seen = key_at[None, :] <= query_at[:, None]
        if WINDOW > 0:
            seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - new_peak[:, None])
    fade = gl.exp2(peak - new_peak)
    return weights, total * fade + gl.sum(weights, 1), new_peak, fade


@gluon.jit
def _store(
    half: gl.constexpr, out, acc, total, first, end, kv_head,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    # Lanes of no query have seen nothing.
    total = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(1, acc.type.layout))
    result = gl.convert_layout((acc / total[:, None]).to(out.dtype.element_ty), WIDE)
    token, head, dim, exists = _places(half, first, end, kv_head, GROUP, HEAD_DIM)
    at = ((token * (KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + dim[None, :]
    gl.store(out + at, result, mask=exists[:, None] & (dim >= 0)[None, :])


__all__ = ["extend_attention", "supports"]
