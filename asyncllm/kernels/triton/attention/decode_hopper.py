"""Decode attention for Hopper GPUs, in Gluon; faster than ``decode`` except for one or two rows.

Rows are cut and added up as in ``decode``, with fewer instructions: reading K and V takes all the
power that a GPU may draw, so everything else that draws power costs time. A producer warp has the
tensor memory accelerator copy pages to shared memory, from where the tensor cores read both
operands. Tokens (for scores) or dimensions of values are the 64 rows of a product, the query heads
of a group its 8 or 16 columns; the softmax runs along a column.

Measured on an H200 (docs/kernels.md): up to 17 % faster than ``decode`` for 16 to 64 rows, 2 to 4 %
for 96 to 224 at the GPU's power limit, and as fast for 4. Two stages are as fast; one
stage, or 128 tokens at a time, is slower by 1 to 4 %. Idle programs cost next to nothing. Over
8-bit pages it takes 0.55 to 0.6 of the time; where rows are many, three programs on a
multiprocessor are 5 % faster than two.

If the heads are not yet encoded, every program encodes its own: the queries of a group, key and
value are rows of one tile, each in a few threads. That saves up to 2.4 us of a layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from asyncllm.kernels.triton.attention.decode_hopper_parts import (
    TILE,
    Layer,
    Memory,
    Shared,
    heads_layout,
    load_heads,
    load_turns,
    piece_of,
    produce,
    tiles_of,
)
from asyncllm.kernels.triton.attention.decode_hopper_steps import (
    attend,
    begin,
    finish,
    take_sinks,
)
from asyncllm.kernels.triton.attention.decode_launch import (
    MANY_PAIRS,
    MAX_PROGRAMS,
    Heads,
    fitting_splits,
    max_length,
    workspace_of,
)
from asyncllm.kernels.triton.attention.hopper_8_bits import (
    attend_8_bits,
    begin_8_bits,
    joined,
    scales_of,
)
from asyncllm.kernels.triton.launch import Launcher, next_power_of_2
from asyncllm.kernels.triton.page_copies import SHARED, can_copy, describe
from asyncllm.kernels.triton.qk_norm_rope import kv_kinds
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding

MAX_GROUP = 16
#: Up to this many rows times K/V heads, ``decode`` is as fast.
FEW_PAIRS = 16
#: Programs that run at once, two on each multiprocessor of an H200.
ONE_WAVE = 264
#: The layout of heads in shared memory: row after row.
PLAIN = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=1, order=[1, 0])


def fold_of(keys: Tensor, spec: AttentionSpec) -> int:
    """How many heads of K and V are taken as one: those of 64 bytes would be half a product."""
    return 2 if keys.itemsize * spec.head_dim == 64 else 1


def encodes(encoding: HeadEncoding, keys: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernel encodes such heads: those of the commonest layers."""
    return (
        kv_kinds(spec) == 2
        and spec.pair_distance is None
        and not encoding.normalizes_values
        and (encoding.q_norm is None or fold_of(keys, spec) == 1)
    )


def supports(q: Tensor, rows: DecodeRows, spec: AttentionSpec) -> bool:
    """Whether the kernel can run this ``launch``, and is faster for this number of rows."""
    keys, fold = rows.keys, fold_of(rows.keys, spec)
    return (
        len(q) * spec.num_kv_heads > FEW_PAIRS
        and can_copy(keys, spec, TILE.value)
        and keys.dtype in (q.dtype, torch.float8_e4m3fn)
        and q.itemsize == 2
        and spec.num_kv_heads % fold == 0
        and spec.group * fold <= MAX_GROUP
        and spec.window is None
        and spec.softcap is None
    )


def launch(
    q: Tensor,
    row_stride: int,
    head_stride: int,
    heads: Heads,
    rows: DecodeRows,
    spec: AttentionSpec,
    out: Tensor,
    overlaps_previous: bool = False,
    pieces: tuple[int, int] | None = None,
) -> None:
    """As ``decode.launch``, for arguments that ``supports`` accepts.

    Args:
        pieces: ``splits`` and ``chunk`` of a ``Cut``, ``chunk`` a multiple of TILE; by default the
            measured best.
    """
    keys, values, block_table, slots, lengths, scales = rows
    fold, page_size = fold_of(keys, spec), keys.shape[1]
    spec = replace(spec, num_kv_heads=spec.num_kv_heads // fold, head_dim=spec.head_dim * fold)
    keys, values = (part.view(*part.shape[:2], -1, spec.head_dim) for part in (keys, values))
    group = spec.group
    splits, chunk = pieces or choose_pieces(len(q), spec, max_length(rows))
    boxes = describe(keys, TILE.value), describe(values, TILE.value)
    args = (
        *(q, row_stride, head_stride, *heads.tensors, heads.sinks, keys, values, *boxes),
        *(block_table, slots, lengths, scales, out, *workspace_of(q.device, len(q), spec, splits)),
        *(block_table.stride(0), splits, chunk),
    )
    columns, lanes = (max(next_power_of_2(n), 8) for n in (group, group + 2))
    run, stages = _launch, 3 if columns == 8 else 2  # two programs fit on a multiprocessor
    if scales is not None:
        stages = 6 if columns == 8 else 5
        if columns == 8 and len(q) * spec.num_kv_heads > ONE_WAVE:
            run, stages = _launch_three, 4 if lanes == 8 else 3
    constants = (
        *(spec.scale, page_size, spec.num_kv_heads, group, spec.head_dim, columns, lanes, stages),
        *(heads.encodes, *heads.constants, fold, overlaps_previous),
    )
    run((spec.num_kv_heads, splits, len(q) + overlaps_previous), args, constants, num_warps=4)


def choose_pieces(rows: int, spec: AttentionSpec, max_length: int) -> tuple[int, int]:
    """``splits`` and ``chunk`` for rows of up to ``max_length`` tokens.

    Few rows are cut so that all programs run at once. Of many, only very long rows are cut, so that
    they do not delay the launch.
    """
    pairs = rows * spec.num_kv_heads
    if pairs <= ONE_WAVE // 2:
        splits, chunk = ONE_WAVE // pairs, 256
    elif pairs <= MANY_PAIRS:
        splits, chunk = 8, 1024
    else:
        splits, chunk = MAX_PROGRAMS // pairs, 4096
    return fitting_splits(splits, chunk, max_length), chunk


# The tensors with one element per row are often slices of an upload, of any alignment.
@gluon.jit(
    do_not_specialize=["table_stride", "splits", "chunk"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "slots", "lengths"],
)
def _decode_hopper(
    q,
    q_row_stride,
    q_head_stride,
    q_weight,
    k_weight,
    rope,
    positions,
    slot_mapping,
    sinks,
    keys,
    values,
    key_boxes,
    value_boxes,
    block_table,
    slots,
    lengths,
    scales,
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
    LANES: gl.constexpr,
    STAGES: gl.constexpr,
    ENCODES: gl.constexpr,
    ROTARY: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    FOLD: gl.constexpr,
    OVERLAPS: gl.constexpr,
    PDL: gl.constexpr,
):
    layer: gl.constexpr = Layer(
        *(SCALE, PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM, COLUMNS, LANES, STAGES),
        *(ROTARY, EPS, OFFSET, FOLD),
    )
    if OVERLAPS and gl.program_id(2) == gl.num_programs(2) - 1:
        # The extra row waits, so that kernels after this one also wait for the previous kernel.
        gdc_wait()
        return
    piece, exists, is_row = piece_of(lengths, slots, block_table, table_stride, splits, chunk)
    # Padding has a result as well, except where the previous kernel may write it.
    if not exists or (OVERLAPS and not is_row):
        return
    # Before the wait, nothing is read that previous kernels write.
    position = 0
    if ENCODES:
        position = gl.load(positions + piece.row).to(gl.int64)
        place = gl.load(slot_mapping + piece.row).to(gl.int64)
    else:
        newest = gl.maximum(piece.newest, 0)
        page = gl.load(piece.table + newest // PAGE_SIZE)
        place = page.to(gl.int64) * PAGE_SIZE + newest % PAGE_SIZE
    memory = Memory(
        *(q, q_row_stride, q_head_stride, q_weight, k_weight, rope, sinks, scales),
        *(position, place, keys, values, out, partial, stats, arrivals, splits),
    )
    dtype: gl.constexpr = q.dtype.element_ty
    # Two numbers of 8-bit pages are one word; they are multiplied as float16.
    of_products: gl.constexpr = dtype if scales is None else gl.float16
    word: gl.constexpr = dtype if scales is None else gl.int16
    WORDS: gl.constexpr = HEAD_DIM if scales is None else HEAD_DIM // 2
    QUERIES: gl.constexpr = [COLUMNS, HEAD_DIM] if scales is None else [2, COLUMNS, WORDS]
    shared = Shared(
        gl.allocate_shared_memory(dtype, [LANES, HEAD_DIM], PLAIN),
        gl.allocate_shared_memory(of_products, QUERIES, SHARED),
        gl.allocate_shared_memory(of_products, [COLUMNS, TILE], SHARED),
        gl.allocate_shared_memory(word, [STAGES, TILE, WORDS], SHARED),
        gl.allocate_shared_memory(word, [STAGES, TILE, WORDS], SHARED),
        gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(shared.barriers.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (memory, piece, shared, layer, ENCODES, OVERLAPS)),
            (produce, (key_boxes, value_boxes, piece, shared, layer)),
        ],
        [1],
        [40],
    )


#: With this many registers, two programs fit on a multiprocessor.
_launch = Launcher(_decode_hopper, max_registers=128)
#: And with this many three.
_launch_three = Launcher(_decode_hopper, max_registers=80)


@gluon.jit
def _consume(
    memory, piece, shared, layer: gl.constexpr, ENCODES: gl.constexpr, OVERLAPS: gl.constexpr
):
    """Attend to a piece, and write the result."""
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    turns = None
    if ENCODES and layer.rotary > 0:
        turns = load_turns(memory.rope, memory.position, layer)
    if not OVERLAPS:
        gdc_wait()
    heads = load_heads(memory, piece, turns, layer, ENCODES)
    if memory.scales is None:
        sums, totals, peak = begin(heads, piece, shared, layer)
        for number in range(tiles_of(piece)):
            sums, totals, peak = attend(sums, totals, peak, shared, piece, number, layer)
        sums = gl.convert_layout(gl.permute(sums, (1, 0)), LAYOUT)
    else:
        k_scale = scales_of(memory.scales, piece.kv_head, layer)
        of_values = memory.scales + layer.kv_heads * layer.fold
        v_scale = scales_of(of_values, piece.kv_head, layer)
        low, high, totals, peak, factor = begin_8_bits(heads, k_scale, piece, shared, layer)
        for number in range(tiles_of(piece)):
            low, high, totals, peak = attend_8_bits(
                low, high, totals, peak, factor, shared, piece, number, layer
            )
        sums = gl.convert_layout(joined(low, high, layer), LAYOUT) * v_scale[:, None]
    total = gl.convert_layout(gl.sum(totals, 0), gl.SliceLayout(1, LAYOUT))
    peak = gl.convert_layout(peak, gl.SliceLayout(1, LAYOUT))
    if memory.sinks is not None:
        sums, total, peak = take_sinks(sums, total, peak, memory, piece, layer)
    finish(sums, total, peak, memory, piece, layer)
