"""Projections of dozens of rows with an 8-bit weight, on Hopper GPUs.

As ``tma_split``, in 8 bits: 64 rows of the weight are the first operand of a warpgroup's products,
and rows of x, rounded to 8 bits, the second. Both stream through shared memory; the ring is filled
with the weight while the previous kernel still writes x. Where tiles are few, programs share them:
each multiplies a part of the columns, and the last one to arrive adds up the parts, in order.

The tensor cores add up few bits, and scales belong to blocks of 128 columns. So the sums of 128
columns are scaled and added up outside of them, in float32 (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
The scales of the next blocks are requested before.

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

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, Output, arrivals, output_layout
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.tuning import Fp8Tile, fp8_rows
from asyncllm.kernels.types import FP8_BLOCK, Fp8Matrix

#: Columns of a block: those of a scale, and the greatest width of a copy to shared memory.
SPAN = gl.constexpr(FP8_BLOCK)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
GATED_SHARED = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
)


class Plan(NamedTuple):
    """Constants of a launch: those of ``Fp8Tile``, padded rows of x, what the projection has."""

    block_m: Any
    parts: Any
    splits: Any
    stages: Any
    unroll: Any
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
        full: a barrier for each stage: its blocks have arrived.
        free: a barrier for each stage: all parts have been multiplied.
    """

    w: Any
    x: Any
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
    """Request a block of x."""
    stage = block % plan.stages
    at = [first_row, (split * ops.blocks + block) * SPAN]
    tma.async_copy_global_to_shared(ops.x, at, rings.full.index(stage), rings.x.index(stage))


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


@gluon.jit
def _consume(ops, output, rings, tile, first_row, split, PART: gl.constexpr, plan: gl.constexpr):
    LAYOUT: gl.constexpr = _sums_layout(plan.block_m)
    gdc_wait()
    part = tile * plan.parts + PART
    rows = _weight_rows(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), part, output.n, plan)
    m = first_row + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, LAYOUT))
    w_at = ops.scale + rows // SPAN * ops.scale_stride + split * ops.blocks
    x_at = ops.x_scale + split * ops.blocks * ops.x_rows + m
    sums = gl.zeros([ROWS, plan.block_m], gl.float32, layout=LAYOUT)
    scales = _scales(w_at, x_at, 0, ops, plan)
    for first in range(0, ops.blocks, plan.unroll):
        later = gl.minimum(first + plan.unroll, ops.blocks - plan.unroll)
        next_scales = _scales(w_at, x_at, later, ops, plan)
        for u in gl.static_range(plan.unroll):
            stage = (first + u) % plan.stages
            mbarrier.wait(rings.full.index(stage), (first + u) // plan.stages & 1)
            w = rings.w[PART].index(stage)
            x = rings.x.index(stage).permute((1, 0))
            zeros = gl.zeros([ROWS, plan.block_m], gl.float32, layout=LAYOUT)
            y = warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)
            y = warpgroup_mma_wait(0, deps=(y,))
            mbarrier.arrive(rings.free.index(stage), count=1)
            if plan.blocked:
                y = y * scales[2 * u][:, None] * scales[2 * u + 1][None, :]
            sums += y
        scales = next_scales
    if not plan.blocked:
        sums = sums * gl.load(ops.scale + rows)[:, None] * gl.load(ops.x_scale + m)[None, :]
    _finish(sums, output, part, rows, m, split, plan)


@gluon.jit
def _scales(w_at, x_at, first, ops, plan: gl.constexpr):
    """Those of the weight and of x of ``unroll`` blocks, by block."""
    scales: gl.tuple = ()
    if plan.blocked:
        for u in gl.static_range(plan.unroll):
            scales += (gl.load(w_at + first + u), gl.load(x_at + (first + u) * ops.x_rows))
    return scales


@gluon.jit
def _weight_rows(i, part, n, plan: gl.constexpr):
    """See ``wgmma_tiles.weight_rows``."""
    if plan.act is None:
        return gl.minimum(part * ROWS + i, n - 1)
    else:
        row = gl.minimum(part * (ROWS // 2) + i // 16 * 8 + i % 8, n // 2 - 1)
        return row + i // 8 % 2 * (n // 2)


@gluon.jit
def _finish(y, output, part, rows, m, split, plan: gl.constexpr):
    """Write outputs; of programs that share some, the last one to arrive does."""
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
    is_last = True
    if plan.splits > 1:
        CELLS: gl.constexpr = ROWS * plan.block_m
        group = part + gl.program_id(1) * (gl.num_programs(2) * plan.parts)
        j = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, y.type.layout))
        cells = i[:, None] * plan.block_m + j[None, :]
        cells = output.partial + group * (plan.splits * CELLS) + cells
        gl.store(cells + split * CELLS, y)
        debug_barrier()  # the stores of all threads come before the arrival
        is_last = gl.atomic_add(output.arrivals + group, 1, sem="acq_rel") == plan.splits - 1
    if is_last:
        if plan.splits > 1:
            gl.store(output.arrivals + group, 0)
            y = gl.load(cells, cache_modifier=".cg")
            for s in gl.static_range(1, plan.splits):
                y += gl.load(cells + s * CELLS, cache_modifier=".cg")
        _write(y, output, part, rows, m, plan)


@gluon.jit
def _write(y, output, part, rows, m, plan: gl.constexpr):
    """From sums to outputs."""
    SIZE: gl.constexpr = ROWS if plan.act is None else ROWS // 2
    OUT: gl.constexpr = output_layout(SIZE, plan.block_m, 4)
    if plan.bias:
        y += gl.load(output.bias + rows).to(gl.float32)[:, None]
    if plan.residual:
        n = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
        at = output.out + m.to(gl.int64)[None, :] * output.stride + n[:, None]
        exists = (m < output.m)[None, :] & (n < output.n)[:, None]
        y += gl.load(at, exists, other=0.0).to(gl.float32)
    if plan.act is not None:
        halves = gl.reshape(y, [ROWS // 16, 2, 8, plan.block_m])
        gate, up = gl.split(gl.permute(halves, [0, 2, 3, 1]))
        y = gl.reshape(activate(gate, plan.act) * up, [SIZE, plan.block_m])
    y = gl.convert_layout(y.to(output.out.dtype.element_ty), OUT)
    m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, OUT)) + gl.program_id(1) * plan.block_m
    n = part * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))
    limit = output.n if plan.act is None else output.n // 2
    at = output.out + m.to(gl.int64)[None, :] * output.stride + n[:, None]
    gl.store(at, y, (m < output.m)[None, :] & (n < limit)[:, None])


@gluon.jit(do_not_specialize=["M", "scale_stride", "blocks"])
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
    UNROLL: gl.constexpr,
    BLOCKED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(BLOCK_M, PARTS, SPLITS, STAGES, UNROLL, BLOCKED, BIAS, RESIDUAL, ACT)
    gdc_launch_dependents()
    ws: gl.tuple = ()
    for _ in gl.static_range(PARTS):
        ws += (gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, SPAN], SHARED),)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, SPAN], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()
    rings = Rings(ws, xs, full, free)
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


def fp8_tiles(tile: Fp8Tile, p: Projection[Fp8Matrix], data: Tensor, scale: Tensor) -> Tensor:
    """Launch the kernel.

    N must be a multiple of 16 with an activation. Programs have at least ``stages`` blocks.

    Args:
        p: its x has been rounded to ``data`` and ``scale``.
        data: e4m3 [rows, K]; rows are a multiple of ``fp8_rows``.
        scale: float32 [K / 128, rows], or [1, rows] if the weight has scales of rows.
    """
    weight = p.weight
    out = p.output()
    size, columns = weight.data.shape
    block_m = fp8_rows(len(p.x))
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
    constants = (block_m, *tile, weight.is_blocked, *p.epilogue)
    _launch((tile.splits, tiles_m, tiles), args, constants, 4)
    return out
