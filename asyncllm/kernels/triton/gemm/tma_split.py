"""Projections of dozens of rows or more, whose weights stream through shared memory.

As ``tma``, but each 64 rows of the weight have a warpgroup of their own, which leaves registers for
the products with up to 256 rows of x; more rows are blocks of 256. Where there are few outputs,
programs share tiles of them: each multiplies a part of the columns, then adds up the sums of all
programs for a part of the rows of x. They wait for each other: see ``kernels.triton.waiting``.

Measured on an H200 (docs/kernels.md): as fast as cuBLAS or up to 28 % faster.
The fastest programs have 64 rows of the weight, and two of them share a tile, not four. Fewer bytes
in flight cost much: with half of the shared memory, to leave room for the next kernel, up to 60 %.
From 224 rows on only the gated projection is faster here than in cuBLAS, which multicasts x to
several multiprocessors; Triton 3.6 cannot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.tma_split_outputs import (
    HALF_SHARED,
    box_rows,
    count_pieces,
    exchange,
    piece_rows,
    piece_start,
    store,
)
from asyncllm.kernels.triton.gemm.wgmma_tiles import (
    GATED_SHARED,
    ROWS,
    SHARED,
    SPAN,
    Output,
    Plan,
    arrivals,
    boxes_of_weight,
    boxes_of_x,
    sums_layout,
    wait,
)
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.tuning import TmaSplitTile, padded_rows

#: Blocks of rows that programs take turns with.
GROUP = gl.constexpr(8)
#: The most rows of a program.
MOST_ROWS = 256


class Rings(NamedTuple):
    """Shared memory.

    Attributes:
        w: by part, [stages, 64, 64].
        x: by piece, [stages, rows, 64].
        full: a barrier for each stage: its blocks have arrived.
        free: a barrier for each stage: all parts have been multiplied.
        old: a barrier for each part: the residual has arrived, where its weights were.
    """

    w: Any
    x: Any
    full: Any
    free: Any
    old: Any


class Sizes(NamedTuple):
    """Constants: those of ``Plan``, blocks of a program, stages of the rings."""

    block_m: Any
    parts: Any
    gated: Any
    blocks: Any
    stages: Any


@gluon.jit
def _copy_w(weight, rings, block, tile, split, sizes: gl.constexpr):
    """Request a block of the weight."""
    stage = block % sizes.stages
    full = rings.full.index(stage)
    mbarrier.expect(full, (sizes.parts * ROWS + sizes.block_m) * SPAN * 2)
    column = (split * sizes.blocks + block) * SPAN
    for p in gl.static_range(sizes.parts):
        w = rings.w[p]
        part = tile * sizes.parts + p
        if sizes.gated:
            w = w._reinterpret(w.dtype, [sizes.stages, ROWS // 16, 2, 8, SPAN], GATED_SHARED)
            at = [part * (ROWS // 16), 0, 0, column]
        else:
            at = [part * ROWS, column]
        tma.async_copy_global_to_shared(weight, at, full, w.index(stage))


@gluon.jit
def _copy_x(x, rings, block, first, split, sizes: gl.constexpr):
    """Request a block of x, of the rows from ``first`` on."""
    BOX: gl.constexpr = box_rows(sizes.block_m)
    stage = block % sizes.stages
    full = rings.full.index(stage)
    column = (split * sizes.blocks + block) * SPAN
    for p in gl.static_range(count_pieces(sizes.block_m)):
        ring = rings.x[p]
        boxes = ring._reinterpret(
            ring.dtype, [sizes.stages * piece_rows(sizes.block_m, p) // BOX, BOX, SPAN], SHARED
        )
        for b in gl.static_range(piece_rows(sizes.block_m, p) // BOX):
            row = first + piece_start(sizes.block_m, p) + b * BOX
            box = boxes.index(stage * (piece_rows(sizes.block_m, p) // BOX) + b)
            tma.async_copy_global_to_shared(x, [row, column], full, box)


@gluon.jit
def _produce(x, weight, rings, tile, first, split, sizes: gl.constexpr):
    for i in gl.static_range(sizes.stages):
        _copy_w(weight, rings, i, tile, split, sizes)
    gdc_wait()
    for i in gl.static_range(sizes.stages):
        _copy_x(x, rings, i, first, split, sizes)
    for block in range(sizes.blocks - sizes.stages):
        mbarrier.wait(rings.free.index(block % sizes.stages), (block // sizes.stages) & 1)
        _copy_w(weight, rings, block + sizes.stages, tile, split, sizes)
        _copy_x(x, rings, block + sizes.stages, first, split, sizes)


@gluon.jit
def _zeros(SIZE: gl.constexpr):
    return gl.zeros([ROWS, SIZE], gl.float32, layout=sums_layout(SIZE, 4))


@gluon.jit
def _consume(
    output,
    box,
    rings,
    tile,
    first,
    split,
    PART: gl.constexpr,
    plan: gl.constexpr,
    sizes: gl.constexpr,
):
    PIECES: gl.constexpr = count_pieces(sizes.block_m)
    sums: gl.tuple = ()
    for p in gl.static_range(PIECES):
        sums += (_zeros(piece_rows(sizes.block_m, p)),)
    gdc_wait()
    for i in range(sizes.blocks):
        stage = i % sizes.stages
        mbarrier.wait(rings.full.index(stage), (i // sizes.stages) & 1)
        w = rings.w[PART].index(stage)
        begun: gl.tuple = ()
        for p in gl.static_range(PIECES):
            x = rings.x[p].index(stage).permute((1, 0))
            begun += (warpgroup_mma(w, x, sums[p], is_async=True),)
        sums = wait(begun, PIECES, PIECES)
        before = (i + sizes.stages - 1) % sizes.stages
        mbarrier.arrive(rings.free.index(before), count=1, pred=i > 0)
    sums = wait(sums, PIECES, 0)
    part = tile * plan.parts + PART
    if box is None:
        exchange(sums, output, part, split, plan)
    else:
        store(sums, output, box, rings.w[PART], rings.old.index(PART), part, first, plan)


@gluon.jit
def _place(M, N, BLOCK_M: gl.constexpr, PARTS: gl.constexpr):
    """The program's tile of outputs, and its first row of x.

    Programs that run at the same time have the same few blocks of rows, which stay in the L2.
    """
    program = gl.program_id(0)
    tiles = gl.cdiv(N, PARTS * ROWS)
    begin = program // (GROUP * tiles) * GROUP
    size = gl.minimum(gl.cdiv(M, BLOCK_M) - begin, GROUP)
    program %= GROUP * tiles
    return program // size, (begin + program % size) * BLOCK_M


@gluon.jit(do_not_specialize=["M"])
def _tma_split_gemm(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    box,  # descriptor of out, or None if programs share outputs
    x,  # descriptor of [M, K]
    weight,  # descriptor of [N, K], or [N / 16, 2, 8, K] if gated
    bias,  # [N]
    partial,
    arrivals,
    M,
    N,
    out_stride,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(BLOCK_M, PARTS, 1, SPLITS, BIAS, RESIDUAL, ACT, 4)
    BLOCKS: gl.constexpr = K // (SPLITS * SPAN)
    sizes: gl.constexpr = Sizes(BLOCK_M, PARTS, ACT is not None, BLOCKS, STAGES)
    gdc_launch_dependents()
    ws: gl.tuple = ()
    for _ in gl.static_range(PARTS):
        ws += (gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, SPAN], SHARED),)
    xs: gl.tuple = ()
    for p in gl.static_range(count_pieces(BLOCK_M)):
        xs += (gl.allocate_shared_memory(x.dtype, [STAGES, piece_rows(BLOCK_M, p), SPAN], SHARED),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=PARTS)
    old = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for p in gl.static_range(PARTS):
        mbarrier.init(old.index(p), count=1)
    fence_async_shared()
    rings = Rings(ws, xs, full, free, old)
    output = Output(out, bias, partial, arrivals, M, N, out_stride)
    tile, first = _place(M, N, BLOCK_M, PARTS)
    split = gl.program_id(1)
    # The last lists: warps of each worker, and registers of their threads. The first consumer gets
    # the remaining registers, which are more.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_consume, (output, box, rings, tile, first, split, 0, plan, sizes)),
                (_produce, (x, weight, rings, tile, first, split, sizes)),
            ],
            [1],
            [40],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (_consume, (output, box, rings, tile, first, split, 0, plan, sizes)),
                (_consume, (output, box, rings, tile, first, split, 1, plan, sizes)),
                (_produce, (x, weight, rings, tile, first, split, sizes)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, box, rings, tile, first, split, 0, plan, sizes)),
                (_consume, (output, box, rings, tile, first, split, 1, plan, sizes)),
                (_consume, (output, box, rings, tile, first, split, 2, plan, sizes)),
                (_produce, (x, weight, rings, tile, first, split, sizes)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


#: By the registers of a thread when a program starts.
_launches = {
    registers: Launcher(_tma_split_gemm, max_registers=registers) for registers in (128, 168)
}


def tma_split_gemm(tile: TmaSplitTile, p: Projection[Tensor], most_rows: int = MOST_ROWS) -> Tensor:
    """Launch the kernel.

    Rows of x, of the weight and of the output must be aligned to 16 bytes; N must be a multiple of
    16 with an activation. Programs that share outputs must not outnumber the multiprocessors, and
    take up to 256 rows.

    Args:
        most_rows: of a program.
    """
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = weight.shape
    block_m = padded_rows(min(len(x), most_rows))
    rows = box_rows(block_m)
    tiles = cdiv(size, tile.parts * 64)
    box = partial = counts = None
    if tile.splits > 1:
        cells = tiles * tile.parts * tile.splits * 64 * block_m
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
        counts = arrivals(x.device)
    elif p.act is None:
        box = TensorDescriptor.from_tensor(out, [rows, 64], SHARED.value)
    else:
        box = TensorDescriptor.from_tensor(out, [rows, 32], HALF_SHARED.value)
    constants = (columns, block_m, *tile, *p.epilogue)
    args = (
        *(out, box, boxes_of_x(x, rows), boxes_of_weight(p, 64)),
        *(p.bias, partial, counts, len(x), size, out.stride(0)),
    )
    # A program of one part with few rows leaves room for a second one on its multiprocessor.
    registers = 168 if tile.parts == 2 or (tile.parts == 1 and block_m > 192) else 128
    grid = (tiles * cdiv(len(x), block_m), tile.splits, 1)
    _launches[registers](grid, args, constants, 4)
    return out
