"""Projections of dozens of rows with an 8-bit weight, on Hopper GPUs.

As ``tma_split``, in 8 bits: 64 rows of the weight are the first operand of a warpgroup's products,
and rows of x, rounded to 8 bits, the second. Both stream through shared memory; the ring is filled
with the weight while the previous kernel still writes x. Where tiles are few, programs share them:
each multiplies a part of the columns, and the last one to arrive adds up the parts, in order.

The tensor cores add up few bits, and scales belong to blocks of 128 columns. So the sums of 128
columns are scaled and added up outside of them, in float32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
The scales of x stream through shared memory, too: a program has many of them, and to wait for each
block's took longer than its product. Those of the weight are few, and requested a block ahead.

Columns are divided by the shape of the weight, whatever the rows. So the bits of a row do not
depend on the others.

On an H200, 32 rows take 31 us with a weight of 24,576 x 4,096; cuBLAS takes 39 (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.gemm.fp8_outputs import finish, weight_rows
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, Output, arrivals
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.tuning import Fp8Tile
from asyncllm.kernels.types import FP8_BLOCK, Fp8Matrix

#: Columns of a block: those of a scale, and the greatest width of a copy to shared memory.
SPAN = gl.constexpr(FP8_BLOCK)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
GATED_SHARED = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
)
SCALES_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


class Plan(NamedTuple):
    """Constants of a launch: those of ``Fp8Tile``, and what the projection has."""

    block_m: Any
    parts: Any
    splits: Any
    stages: Any
    blocked: Any
    bias: Any
    residual: Any
    act: Any


class Operands(NamedTuple):
    """Descriptors, scales (of x float32 [blocks, x_rows] or [1, x_rows]), blocks of a program."""

    x: Any
    x_scale: Any
    weight: Any
    scale: Any
    x_rows: Any
    scale_stride: Any
    blocks: Any


class Rings(NamedTuple):
    """Shared memory.

    Attributes:
        w: by part, [stages, 64, 128].
        x: [stages, block_m, 128].
        x_scale: [stages, block_m], of scales of blocks.
        full: a barrier for each stage: its blocks have arrived.
        free: a barrier for each stage: all parts have been multiplied.
    """

    w: Any
    x: Any
    x_scale: Any
    full: Any
    free: Any


@gluon.constexpr_function
def _sums_layout(columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def _copy_w(ops, rings, block, tile, split, plan: gl.constexpr):
    """Request a block of the weight."""
    stage = block % plan.stages
    full = rings.full.index(stage)
    mbarrier.expect(full, (plan.parts * ROWS + plan.block_m) * SPAN)
    column = (split * ops.blocks + block) * SPAN
    for p in gl.static_range(plan.parts):
        w = rings.w[p]
        part = tile * plan.parts + p
        if plan.act is None:
            at = [part * ROWS, column]
        else:
            w = w._reinterpret(w.dtype, [plan.stages, ROWS // 16, 2, 8, SPAN], GATED_SHARED)
            at = [part * (ROWS // 16), 0, 0, column]
        tma.async_copy_global_to_shared(ops.weight, at, full, w.index(stage))


@gluon.jit
def _copy_x(ops, rings, block, first_row, split, plan: gl.constexpr):
    """Request a block of x, and its scales."""
    stage = block % plan.stages
    full = rings.full.index(stage)
    column = split * ops.blocks + block
    at = [first_row, column * SPAN]
    tma.async_copy_global_to_shared(ops.x, at, full, rings.x.index(stage))
    if plan.blocked:
        m = first_row + gl.arange(0, plan.block_m, layout=gl.BlockedLayout([1], [32], [1], [0]))
        # Where there is no row, any scale does.
        at = ops.x_scale + column * ops.x_rows + gl.minimum(m, ops.x_rows - 1)
        async_copy.async_copy_global_to_shared(rings.x_scale.index(stage), at)
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _produce(ops, rings, tile, first_row, split, plan: gl.constexpr):
    for i in gl.static_range(plan.stages):
        _copy_w(ops, rings, i, tile, split, plan)
    gdc_wait()
    for i in gl.static_range(plan.stages):
        _copy_x(ops, rings, i, first_row, split, plan)
    for block in range(plan.stages, ops.blocks):
        before = block - plan.stages
        mbarrier.wait(rings.free.index(before % plan.stages), (before // plan.stages) & 1)
        _copy_w(ops, rings, block, tile, split, plan)
        _copy_x(ops, rings, block, first_row, split, plan)
    if plan.blocked:
        async_copy.wait_group(0)


@gluon.jit
def _consume(ops, output, rings, tile, first_row, split, PART: gl.constexpr, plan: gl.constexpr):
    LAYOUT: gl.constexpr = _sums_layout(plan.block_m)
    gdc_wait()
    part = tile * plan.parts + PART
    rows = weight_rows(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), part, output.n, plan)
    w_at = ops.scale + rows // SPAN * ops.scale_stride + split * ops.blocks
    sums = gl.zeros([ROWS, plan.block_m], gl.float32, layout=LAYOUT)
    w_scales = _w_scales(w_at, 0, ops, plan)
    for block in range(ops.blocks):
        stage = block % plan.stages
        later = _w_scales(w_at, block + 1, ops, plan)
        mbarrier.wait(rings.full.index(stage), block // plan.stages & 1)
        w = rings.w[PART].index(stage)
        x = rings.x.index(stage).permute((1, 0))
        zeros = gl.zeros([ROWS, plan.block_m], gl.float32, layout=LAYOUT)
        y = warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)
        if plan.blocked:
            x_scale = rings.x_scale.index(stage).load(gl.SliceLayout(0, LAYOUT))
        y = warpgroup_mma_wait(0, deps=(y,))
        if plan.blocked:
            y = y * w_scales[0][:, None] * x_scale[None, :]
        mbarrier.arrive(rings.free.index(stage), count=1)
        sums += y
        w_scales = later
    if not plan.blocked:
        m = first_row + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, LAYOUT))
        of_x = gl.load(ops.x_scale + gl.minimum(m, ops.x_rows - 1))
        sums = sums * gl.load(ops.scale + rows)[:, None] * of_x[None, :]
    finish(sums, output, part, rows, first_row, split, plan)


@gluon.jit
def _w_scales(w_at, block, ops, plan: gl.constexpr):
    """The weight's scales of a block, or nothing; past the end, the last ones again."""
    scales: gl.tuple = ()
    if plan.blocked:
        scales += (gl.load(w_at + gl.minimum(block, ops.blocks - 1)),)
    return scales


@gluon.jit(do_not_specialize=["M", "x_rows", "scale_stride", "blocks"])
def _fp8_tiles(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # descriptor of [M, K]
    x_scale,
    weight,  # descriptor of [N, K], or [N / 16, 2, 8, K] if gated
    scale,
    bias,  # [N]
    partial,
    arrivals,
    M,
    N,
    out_stride,
    x_rows,
    scale_stride,
    blocks,
    BLOCK_M: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(BLOCK_M, PARTS, SPLITS, STAGES, BLOCKED, BIAS, RESIDUAL, ACT)
    gdc_launch_dependents()
    ws: gl.tuple = ()
    for _ in gl.static_range(PARTS):
        ws += (gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, SPAN], SHARED),)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, SPAN], SHARED)
    x_scales = None
    if BLOCKED:
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], SCALES_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # The producer's 32 threads copy scales.
        mbarrier.init(full.index(i), count=1 + 32 if BLOCKED else 1)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()
    rings = Rings(ws, xs, x_scales, full, free)
    ops = Operands(x, x_scale, weight, scale, x_rows, scale_stride, blocks)
    output = Output(out, bias, partial, arrivals, M, N, out_stride)
    split, first_row, tile = gl.program_id(0), gl.program_id(1) * BLOCK_M, gl.program_id(2)
    # The last lists: warps of each worker, and registers of their threads. The first consumer gets
    # the remaining registers, which are more.
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_consume, (ops, output, rings, tile, first_row, split, 0, plan)),
                (_produce, (ops, rings, tile, first_row, split, plan)),
            ],
            [1],
            [40],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (_consume, (ops, output, rings, tile, first_row, split, 0, plan)),
                (_consume, (ops, output, rings, tile, first_row, split, 1, plan)),
                (_produce, (ops, rings, tile, first_row, split, plan)),
            ],
            [4, 1],
            [168 if BLOCK_M <= 64 else 232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ops, output, rings, tile, first_row, split, 0, plan)),
                (_consume, (ops, output, rings, tile, first_row, split, 1, plan)),
                (_consume, (ops, output, rings, tile, first_row, split, 2, plan)),
                (_produce, (ops, rings, tile, first_row, split, plan)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


_launch = Launcher(_fp8_tiles, max_registers=128)
#: Of two parts with more than 64 rows of x.
_launch_wide = Launcher(_fp8_tiles, max_registers=168)


def fp8_tiles(tile: Fp8Tile, p: Projection[Fp8Matrix], data: Tensor, scale: Tensor) -> Tensor:
    """Launch the kernel.

    N must be a multiple of 16 with an activation. Programs have at least ``stages`` blocks.

    Args:
        p: its x has been rounded to ``data`` and ``scale``.
        data: e4m3 [rows, K]; there may be more rows than in x.
        scale: float32 [K / 128, rows], or [1, rows] if the weight has scales of rows.
    """
    weight = p.weight
    out = p.output()
    size, columns = weight.data.shape
    block_m = tile.rows
    tiles, tiles_m = cdiv(size, 64 * tile.parts), cdiv(len(p.x), block_m)
    partial = counts = None
    if tile.splits > 1:
        cells = tiles * tiles_m * tile.splits * tile.parts * 64 * block_m
        partial = torch.empty(cells, dtype=torch.float32, device=out.device)
        counts = arrivals(out.device)
    x_box = TensorDescriptor.from_tensor(data, [block_m, 128], SHARED.value)
    if p.act is None:
        w_box = TensorDescriptor.from_tensor(weight.data, [64, 128], SHARED.value)
    else:
        halves = weight.data.view(2, size // 16, 8, columns).permute(1, 0, 2, 3)
        w_box = TensorDescriptor.from_tensor(halves, [4, 2, 8, 128], GATED_SHARED.value)
    args = (
        *(out, x_box, scale, w_box, weight.scale, p.bias, partial, counts, len(p.x), size),
        *(out.stride(0), scale.stride(0), weight.scale.stride(0)),
        cdiv(columns, FP8_BLOCK) // tile.splits,
    )
    launch = _launch_wide if tile.parts == 2 and block_m > 64 else _launch
    launch((tile.splits, tiles_m, tiles), args, (*tile, weight.is_blocked, *p.epilogue), 4)
    return out
