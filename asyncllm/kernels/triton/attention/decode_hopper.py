"""Decode attention for Hopper GPUs, in Gluon; faster than ``decode`` except for one or two rows.

Rows are cut and added up as in ``decode``, with fewer instructions: reading K and V takes all the
power that a GPU may draw, so everything else that draws power costs time. A producer warp has the
tensor memory accelerator copy pages to shared memory, from where the tensor cores read both
operands. Tokens (for scores) or dimensions of values are the 64 rows of a product, the query heads
of a group its 8 or 16 columns; the softmax runs along a column.

On an H200 at its power limit, bfloat16, 8 K/V heads of 128, 32 query heads, rows of 100 to 1,400
tokens, heads encoded: microseconds, alone, and with the products of a layer of Qwen3-8B. The
prediction was 3 % less with the products, from half of the instructions of a tile.

| rows | alone | ``decode`` | TB/s | with products | ``decode`` |
|------|-------|------------|------|---------------|------------|
| 96   | 73.6  | 76.4       | 4.04 | 199.8         | 201.1      |
| 160  | 121.6 | 125.4      | 4.16 | 266.6         | 269.6      |
| 224  | 169.7 | 173.9      | 4.25 | 365.0         | 368.5      |

Two stages are as fast; one stage, or 128 tokens at a time, is slower by 1 to 4 %. Fewer rows,
alone, whole or in up to 2, 4 or 8 pieces of at least 512, 256 or 128 tokens; the floor is 4.5 TB/s:

| rows | floor | ``decode`` | whole | 2 of 512 | 4 of 256 | 8 of 128 |
|------|-------|------------|-------|----------|----------|----------|
| 16   | 11.3  | 17.8       | 17.4  | 16.0     | 18.0     | 22.3     |
| 24   | 15.2  | 24.0       | 21.3  | 22.2     | 24.6     | 30.0     |
| 32   | 21.6  | 31.6       | 26.2  | 28.4     | 31.5     | 39.8     |
| 48   | 33.9  | 43.0       | 40.2  | 40.0     | 44.5     | 56.4     |
| 64   | 44.5  | 55.1       | 50.9  | 51.7     | 57.0     | 71.5     |

Idle programs cost next to nothing.

If the heads are not yet encoded, every program encodes its own: the queries of a group, key and
value are rows of one tile, each in a few threads. A layer with that, and with a separate kernel;
the prediction was a gain of its 3.7 us. (With one tile after the other, in three times the
instructions, 8B was 1 to 3 % slower than with either.)

| us   | 8B, 24 rows | 64    | 128   | 160   | 192   | 0.6B, 64 rows | 128   | 192   |
|------|-------------|-------|-------|-------|-------|---------------|-------|-------|
| two  | 128.8       | 161.5 | 221.8 | 255.2 | 290.1 | 76.3          | 125.6 | 178.2 |
| one  | 127.3       | 159.2 | 219.6 | 252.8 | 289.0 | 74.6          | 123.8 | 176.9 |

A layer with few rows of 130 to 380, 100 to 1,400, and 3,000 to 9,000 tokens; all programs run at
once, with pieces of at least 256 tokens (with 128 and 512, at most 1 % off, but 2 us slower for 4
rows):

| us, 0.6B     | 2 rows         | 4              | 8              | 16              |
|--------------|----------------|----------------|----------------|-----------------|
| ``decode``   | 18.1 18.3 33.4 | 17.8 18.9 43.4 | 20.5 23.3 62.8 | 24.1 31.8 116.9 |
| here         | 20.1 19.4 37.0 | 17.8 19.0 43.1 | 17.5 23.5 60.4 | 22.5 31.2 115.3 |

| us, 8B       | 2 rows      | 4           | 8           | 16          |
|--------------|-------------|-------------|-------------|-------------|
| ``decode``   | 103 103 121 | 106 108 134 | 105 108 148 | 112 118 206 |
| here         | 102 101 117 | 104 105 129 | 102 105 142 | 107 115 203 |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from asyncllm.kernels.triton.attention.decode_hopper_encode import load_heads, load_turns
from asyncllm.kernels.triton.attention.decode_hopper_parts import (
    TILE,
    Layer,
    Memory,
    Shared,
    heads_layout,
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
    Rows,
    fitting_splits,
    workspace_of,
)
from asyncllm.kernels.triton.launch import Launcher, next_power_of_2
from asyncllm.kernels.triton.page_copies import SHARED, can_copy, describe

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.kernels.types import AttentionSpec

MAX_GROUP = 16
#: Up to this many rows times K/V heads, ``decode`` is as fast.
FEW_PAIRS = 16
#: Programs that run at once, two on each multiprocessor of an H200.
ONE_WAVE = 264
#: The layout of heads in shared memory: row after row.
PLAIN = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=1, order=[1, 0])


def supports(q: Tensor, rows: Rows, spec: AttentionSpec) -> bool:
    """Whether the kernel can run this ``launch``, and is faster for this number of rows."""
    return (
        len(q) * spec.num_kv_heads > FEW_PAIRS
        and can_copy(rows.keys, spec, TILE.value)
        and q.dtype == rows.keys.dtype
        and spec.group <= MAX_GROUP
        and spec.window is None
        and spec.softcap is None
    )


def launch(
    q: Tensor,
    row_stride: int,
    head_stride: int,
    heads: Heads,
    rows: Rows,
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
    keys, values, block_table, slots, lengths = rows
    group, page_size = spec.group, keys.shape[1]
    splits, chunk = pieces or choose_pieces(len(q), spec, block_table.shape[1] * page_size)
    boxes = describe(keys, TILE.value), describe(values, TILE.value)
    args = (
        *(q, row_stride, head_stride, *heads.tensors, heads.sinks, keys, values, *boxes),
        *(block_table, slots, lengths, out, *workspace_of(q.device, len(q), spec, splits)),
        *(block_table.stride(0), splits, chunk),
    )
    columns, lanes = (max(next_power_of_2(n), 8) for n in (group, group + 2))
    stages = 3 if columns == 8 else 2  # two programs fit on a multiprocessor
    constants = (
        *(spec.scale, page_size, spec.num_kv_heads, group, spec.head_dim, columns, lanes, stages),
        *(heads.encodes, *heads.constants, overlaps_previous),
    )
    _launch((spec.num_kv_heads, splits, len(q) + overlaps_previous), args, constants, num_warps=4)


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
    OVERLAPS: gl.constexpr,
    PDL: gl.constexpr,
):
    layer: gl.constexpr = Layer(
        SCALE, PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM, COLUMNS, LANES, STAGES, ROTARY, EPS, OFFSET
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
        *(q, q_row_stride, q_head_stride, q_weight, k_weight, rope, sinks, position, place),
        *(keys, values, out, partial, stats, arrivals, splits),
    )
    dtype: gl.constexpr = q.dtype.element_ty
    shared = Shared(
        gl.allocate_shared_memory(dtype, [LANES, HEAD_DIM], PLAIN),
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
            (_consume, (memory, piece, shared, layer, ENCODES, OVERLAPS)),
            (produce, (key_boxes, value_boxes, piece, shared, layer)),
        ],
        [1],
        [40],
    )


#: With this many registers, two programs fit on a multiprocessor.
_launch = Launcher(_decode_hopper, max_registers=128)


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
    sums, totals, peak = begin(heads, piece, shared, layer)
    for number in range(tiles_of(piece)):
        sums, totals, peak = attend(sums, totals, peak, shared, piece, number, layer)
    sums = gl.convert_layout(gl.permute(sums, (1, 0)), LAYOUT)
    total = gl.convert_layout(gl.sum(totals, 0), gl.SliceLayout(1, LAYOUT))
    peak = gl.convert_layout(peak, gl.SliceLayout(1, LAYOUT))
    if memory.sinks is not None:
        sums, total, peak = take_sinks(sums, total, peak, memory, piece, layer)
    finish(sums, total, peak, memory, piece, layer)
