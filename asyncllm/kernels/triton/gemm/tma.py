"""Projections of a few to dozens of rows with large weights, which stream through shared memory.

Grid: tiles of parts * 64 / fold outputs, splits of the columns. In Gluon: a producer warp has the
tensor memory accelerator copy blocks of the weight, and of x, to two rings in shared memory; a
warpgroup multiplies them. The ring of the weight is filled while the previous kernel still writes
x. Another kernel normalises x.

Measured on an H200 (docs/kernels.md): 8 rows take at most 22 % longer than reading the weight.
More rows take longer because of x: a program of 32 outputs and 32 rows reads as many bytes of x as
of the weight, and only large weights have a program of 192 outputs for every multiprocessor. Where
programs are small, rings of half the shared memory are 2 us faster than rings of all of it: the
next kernel fills its rings while those of this one run dry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.wgmma_tiles import (
    GATED_SHARED,
    ROWS,
    SHARED,
    SPAN,
    Output,
    Plan,
    boxes_of_weight,
    boxes_of_x,
    load_residual,
    padded_rows,
    shared_sums,
    sums_layout,
    wait,
    write,
)
from asyncllm.kernels.triton.launch import Launcher
from asyncllm.kernels.tuning import TmaTile


class Rings(NamedTuple):
    """Shared memory.

    Attributes:
        w: [stages * parts, 64, block_k].
        x: [x stages, fold * block_m, block_k].
        w_full, x_full: a barrier for each stage: its block has arrived.
        free: a barrier for each stage of w: its block and that of x have been multiplied.
    """

    w: Any
    x: Any
    w_full: Any
    x_full: Any
    free: Any


class Sizes(NamedTuple):
    """Constants: those of ``Plan``, columns of a block, blocks of a program, stages of rings."""

    block_m: Any
    parts: Any
    fold: Any
    gated: Any
    block_k: Any
    blocks: Any
    stages: Any
    x_stages: Any
    stagger: Any


@gluon.jit
def _column(block, tile, split, piece, sizes: gl.constexpr):
    """The first column of a block. With ``stagger``, programs request different parts of x."""
    if sizes.stagger:
        block = (block + tile) % sizes.blocks
    return ((split * sizes.fold + piece) * sizes.blocks + block) * sizes.block_k


@gluon.jit
def _copy_w(weight, rings, block, tile, split, sizes: gl.constexpr):
    """Request a block of the weight."""
    SIZE: gl.constexpr = ROWS // sizes.fold
    SPANS: gl.constexpr = sizes.block_k // SPAN
    BOXES: gl.constexpr = sizes.stages * sizes.parts * SPANS * sizes.fold
    if sizes.gated:
        boxes = rings.w._reinterpret(rings.w.dtype, [BOXES, SIZE // 16, 2, 8, SPAN], GATED_SHARED)
    else:
        boxes = rings.w._reinterpret(rings.w.dtype, [BOXES, SIZE, SPAN], SHARED)
    stage = block % sizes.stages
    full = rings.w_full.index(stage)
    mbarrier.expect(full, sizes.parts * ROWS * sizes.block_k * 2)
    for p in gl.static_range(sizes.parts):
        part = tile * sizes.parts + p
        for span in gl.static_range(SPANS):
            for f in gl.static_range(sizes.fold):
                box = ((stage * sizes.parts + p) * SPANS + span) * sizes.fold + f
                column = _column(block, tile, split, f, sizes) + span * SPAN
                at = [part * (SIZE // 16), 0, 0, column] if sizes.gated else [part * SIZE, column]
                tma.async_copy_global_to_shared(weight, at, full, boxes.index(box))


@gluon.jit
def _copy_x(x, rings, block, tile, split, sizes: gl.constexpr):
    """Request a block of x."""
    SPANS: gl.constexpr = sizes.block_k // SPAN
    BOXES: gl.constexpr = sizes.x_stages * SPANS * sizes.fold
    stage = block % sizes.x_stages
    full = rings.x_full.index(stage)
    mbarrier.expect(full, sizes.fold * sizes.block_m * sizes.block_k * 2)
    boxes = rings.x._reinterpret(rings.x.dtype, [BOXES, sizes.block_m, SPAN], SHARED)
    for span in gl.static_range(SPANS):
        for f in gl.static_range(sizes.fold):
            box = (stage * SPANS + span) * sizes.fold + f
            column = _column(block, tile, split, f, sizes) + span * SPAN
            tma.async_copy_global_to_shared(x, [0, column], full, boxes.index(box))


@gluon.jit
def _produce(x, weight, rings, tile, split, sizes: gl.constexpr):
    for i in gl.static_range(sizes.stages):
        _copy_w(weight, rings, i, tile, split, sizes)
    gdc_wait()
    for i in gl.static_range(sizes.x_stages):
        _copy_x(x, rings, i, tile, split, sizes)
    for i in range(sizes.blocks - sizes.x_stages):
        mbarrier.wait(rings.free.index(i % sizes.stages), (i // sizes.stages) & 1)
        if i + sizes.stages < sizes.blocks:
            _copy_w(weight, rings, i + sizes.stages, tile, split, sizes)
        _copy_x(x, rings, i + sizes.x_stages, tile, split, sizes)


@gluon.jit
def _consume(output, rings, tile, split, plan: gl.constexpr, sizes: gl.constexpr):
    SUMS: gl.constexpr = sums_layout(plan.fold * plan.block_m, plan.warps)
    sums: gl.tuple = ()
    for _ in gl.static_range(plan.parts):
        sums += (gl.zeros([ROWS, plan.fold * plan.block_m], gl.float32, layout=SUMS),)
    gdc_wait()
    olds = load_residual(output, tile, plan)
    for i in range(sizes.blocks):
        stage = i % sizes.stages
        x_stage = i % sizes.x_stages
        mbarrier.wait(rings.w_full.index(stage), (i // sizes.stages) & 1)
        mbarrier.wait(rings.x_full.index(x_stage), (i // sizes.x_stages) & 1)
        x = rings.x.index(x_stage).permute((1, 0))
        begun: gl.tuple = ()
        for p in gl.static_range(plan.parts):
            w = rings.w.index(stage * plan.parts + p)
            begun += (warpgroup_mma(w, x, sums[p], is_async=True),)
        sums = wait(begun, plan.parts, plan.parts)
        before = (i + sizes.stages - 1) % sizes.stages
        mbarrier.arrive(rings.free.index(before), count=1, pred=i > 0)
    sums = wait(sums, plan.parts, 0)
    write(sums, None, olds, output, tile, split, plan)


@gluon.jit(do_not_specialize=["M"])
def _tma_gemm(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
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
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    FOLD: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    STAGGER: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(BLOCK_M, PARTS, FOLD, SPLITS, BIAS, RESIDUAL, ACT, 4)
    BLOCKS: gl.constexpr = K // (FOLD * SPLITS * BLOCK_K)
    GATED: gl.constexpr = ACT is not None
    sizes: gl.constexpr = Sizes(
        BLOCK_M, PARTS, FOLD, GATED, BLOCK_K, BLOCKS, STAGES, X_STAGES, STAGGER
    )
    gdc_launch_dependents()
    dtype: gl.constexpr = x.dtype
    rings = Rings(
        gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, BLOCK_K], SHARED),
        gl.allocate_shared_memory(dtype, [X_STAGES, FOLD * BLOCK_M, BLOCK_K], SHARED),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(rings.w_full.index(i), count=1)
        mbarrier.init(rings.free.index(i), count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(rings.x_full.index(i), count=1)
    fence_async_shared()
    output = Output(out, bias, partial, arrivals, M, N, out_stride)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    gl.warp_specialize(
        [
            (_consume, (output, rings, tile, split, plan, sizes)),
            (_produce, (x, weight, rings, tile, split, sizes)),
        ],
        [1],
        [40],
    )


_launch = Launcher(_tma_gemm, max_registers=128)


def tma_gemm(tile: TmaTile, p: Projection[Tensor]) -> Tensor:
    """Launch the kernel.

    Rows of x and of the weight must be aligned to 16 bytes; N must be a multiple of 16 with an
    activation.
    """
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = weight.shape
    block_m = padded_rows(len(x), 4)
    rows = 64 // tile.fold
    tiles, partial, arrivals = shared_sums(size, tile.parts * rows, tile.splits, block_m, x.device)
    constants = (
        *(columns, block_m, tile.block_k, tile.parts, tile.fold, tile.splits),
        *(tile.stages, tile.x_stages, tile.stagger, *p.epilogue),
    )
    args = (
        *(out, boxes_of_x(x, block_m), boxes_of_weight(p, rows)),
        *(p.bias, partial, arrivals, len(x), size, out.stride(0)),
    )
    _launch((tiles, tile.splits, 1), args, constants, 4)
    return out
