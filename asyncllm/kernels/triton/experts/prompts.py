"""Products of many rows with the matrices of their experts, on Hopper GPUs.

Programs stay: each computes tiles of 128 rows and ``block_n`` outputs, one after the other. A
warpgroup loads blocks of x and of the weight into a ring in shared memory, already for the next
tile while one is written; two others multiply 64 rows each. The tensor memory accelerator copies
the weight; it cannot gather rows on Hopper, so threads copy those of x.

Sums of 8-bit numbers are scaled and added up for 128 columns at a time, as in ``gemm.fp8_tiles``.

On an H200, the products of 8,192 tokens of Qwen3-30B-A3B take 1.34 ms a layer in bfloat16 and 1.17
in 8 bits; those of ``products`` take 1.41 and 1.44 (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.experts.product import Product, parts
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.gemm.fp8_tiles import SHARED as FP8_SHARED
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, SHARED
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import Fp8Matrix

#: From so many rows of an expert on, this kernel takes less time than ``products``.
LEAST_ROWS = 64
#: Rows of a tile.
BLOCK_M = gl.constexpr(128)


class Plan(NamedTuple):
    """Constants of a launch.

    Attributes:
        outputs, columns: of the weight; ``outputs`` has gate and up if it is gated.
        top_k: experts of a token.
        block_n: rows of the weight of a tile.
        span: columns of a block.
        stages: of the ring.
        blocked: whether x and the weight have 8 bits, with scales of blocks.
        act: of the gate, in the first product.
    """

    outputs: Any
    columns: Any
    top_k: Any
    block_n: Any
    span: Any
    stages: Any
    blocked: Any
    act: Any


class Operands(NamedTuple):
    """What is multiplied, and the tiles; see ``products._multiply``.

    Attributes:
        tiles: of a block of rows.
        total: of all blocks.
    """

    x: Any
    x_scale: Any
    weight: Any
    scale: Any
    factors: Any
    order: Any
    blocks: Any
    tiles: Any
    total: Any
    x_rows: Any
    x_stride: Any


class Rings(NamedTuple):
    """Shared memory.

    Attributes:
        x: [2 * stages, 64, span].
        w: [stages, block_n, span].
        full: a barrier for each stage: its blocks have arrived.
        free: a barrier for each stage: both warpgroups have multiplied them.
    """

    x: Any
    w: Any
    full: Any
    free: Any


@gluon.constexpr_function
def _sums(columns: int, bits: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def _output_layout(columns: int) -> gl.BlockedLayout:
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _tile(t, ops):
    """A tile of a block, the block's expert, or -1, its first row and its end."""
    at = ops.blocks + t // ops.tiles * 3
    return t % ops.tiles, gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _produce(ops, rings, plan: gl.constexpr):
    EACH: gl.constexpr = 128 // ops.x.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [4, 8], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = plan.columns // plan.span
    HALF: gl.constexpr = plan.block_n // 2
    xs = rings.x._reinterpret(rings.x.dtype, [plan.stages, BLOCK_M, plan.span], rings.x.layout)
    ws = rings.w._reinterpret(rings.w.dtype, [2 * plan.stages, HALF, plan.span], rings.w.layout)
    i = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, plan.span, layout=gl.SliceLayout(0, LAYOUT))
    gdc_wait()
    turn = 0
    for t in range(gl.program_id(0), ops.total, gl.num_programs(0)):
        tile, expert, first, end = _tile(t, ops)
        if expert >= 0:
            source = source_rows(first + i, end, ops, plan)
            at = ops.x + source.to(gl.int64)[:, None] * ops.x_stride + k[None, :]
            n = expert * plan.outputs + _first_output(tile, plan)
            second = n + (HALF if plan.act is None else plan.outputs // 2)
            for b in range(BLOCKS):
                stage = turn % plan.stages
                full = rings.full.index(stage)
                mbarrier.wait(rings.free.index(stage), (turn // plan.stages & 1) ^ 1)
                mbarrier.expect(full, plan.block_n * plan.span * (16 // EACH))
                column = b * plan.span
                for_gate = ws.index(2 * stage)
                tma.async_copy_global_to_shared(ops.weight, [n, column], full, for_gate)
                for_up = ws.index(2 * stage + 1)
                tma.async_copy_global_to_shared(ops.weight, [second, column], full, for_up)
                async_copy.async_copy_global_to_shared(xs.index(stage), at + column)
                async_copy.mbarrier_arrive(full, increment_count=False)
                turn += 1
    async_copy.wait_group(0)


@gluon.jit
def _first_output(tile, plan: gl.constexpr):
    """The row of an expert's weight that a tile begins with."""
    if plan.act is None:
        return tile * plan.block_n
    else:
        return tile * (plan.block_n // 2)


@gluon.jit
def source_rows(row, end, ops, plan: gl.constexpr):
    """Rows of x; past the end, the last row again."""
    row = gl.minimum(row, end - 1)
    if plan.act is None:
        return row
    else:
        return gl.load(ops.order + row) // plan.top_k


@gluon.jit
def _operands(rings, turn, PART: gl.constexpr, plan: gl.constexpr):
    stage = turn % plan.stages
    mbarrier.wait(rings.full.index(stage), turn // plan.stages & 1)
    fence_async_shared()  # the tensor cores see what threads have written
    return rings.x.index(2 * stage + PART), rings.w.index(stage).permute((1, 0))


@gluon.jit
def _consume(out, ops, rings, PART: gl.constexpr, plan: gl.constexpr):
    BITS: gl.constexpr = ops.x.dtype.element_ty.primitive_bitwidth
    SUMS: gl.constexpr = _sums(plan.block_n, BITS)
    BLOCKS: gl.constexpr = plan.columns // plan.span
    i = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    gdc_wait()
    turn = 0
    for t in range(gl.program_id(0), ops.total, gl.num_programs(0)):
        tile, expert, first, end = _tile(t, ops)
        if expert >= 0:
            sums = gl.zeros([ROWS, plan.block_n], gl.float32, layout=SUMS)
            if plan.blocked:
                x_at = ops.x_scale + source_rows(first + i, end, ops, plan)
                n = expert * plan.outputs + _first_output(tile, plan)
                w_at = ops.scale + n // 128 * BLOCKS
                of_up = ops.scale + (n + plan.outputs // 2) // 128 * BLOCKS
                factors = _factors(x_at, w_at, of_up, 0, ops, plan)
                for b in range(BLOCKS):
                    later = _factors(x_at, w_at, of_up, gl.minimum(b + 1, BLOCKS - 1), ops, plan)
                    x, w = _operands(rings, turn, PART, plan)
                    zeros = gl.zeros([ROWS, plan.block_n], gl.float32, layout=SUMS)
                    y = warpgroup_mma(x, w, zeros, use_acc=False, is_async=True)
                    y = warpgroup_mma_wait(0, deps=(y,))
                    mbarrier.arrive(rings.free.index(turn % plan.stages), count=1)
                    sums += y * _spread(factors, SUMS, plan)
                    factors = later
                    turn += 1
            else:
                for b in range(BLOCKS):
                    x, w = _operands(rings, turn, PART, plan)
                    sums = warpgroup_mma(x, w, sums, is_async=True)
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                    before = (turn + plan.stages - 1) % plan.stages
                    mbarrier.arrive(rings.free.index(before), count=1, pred=b > 0)
                    turn += 1
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(rings.free.index((turn - 1) % plan.stages), count=1)
            _write(out, sums, ops, expert, tile, first + PART * ROWS, end, plan)


@gluon.jit
def _factors(x_at, w_at, of_up, block, ops, plan: gl.constexpr):
    """The scales of a block of columns: of x, of the weight, and of its rows of up."""
    w = gl.load(w_at + block)
    up = w if plan.act is None else gl.load(of_up + block)
    return gl.load(x_at + block * ops.x_rows), w, up


@gluon.jit
def _spread(factors, SUMS: gl.constexpr, plan: gl.constexpr):
    """What products are multiplied by."""
    x, w, up = factors
    if plan.act is None:
        return (x * w)[:, None]
    else:
        j = gl.arange(0, plan.block_n, layout=gl.SliceLayout(0, SUMS))
        is_gate = (j < plan.block_n // 2)[None, :]
        return gl.where(is_gate, (x * w)[:, None], (x * up)[:, None])


@gluon.jit
def _write(out, sums, ops, expert, tile, first, end, plan: gl.constexpr):
    SUMS: gl.constexpr = sums.type.layout
    GATED: gl.constexpr = plan.act is not None
    SIZE: gl.constexpr = plan.block_n // 2 if GATED else plan.block_n
    LIMIT: gl.constexpr = plan.outputs // 2 if GATED else plan.outputs
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, SIZE]), [0, 2, 1]))
        y = activate(gate, plan.act) * up
    else:
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        choice = gl.load(ops.order + gl.minimum(row, end - 1))
        y = sums * gl.load(ops.factors + choice).to(gl.float32)[:, None]
    LAYOUT: gl.constexpr = _output_layout(SIZE)
    y = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    place = row if GATED else gl.load(ops.order + gl.minimum(row, end - 1))
    n = tile * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    at = out + place.to(gl.int64)[:, None] * LIMIT + n[None, :]
    gl.store(at, y, (row < end)[:, None] & (n < LIMIT)[None, :])


@gluon.jit(do_not_specialize=["tiles", "total", "x_rows"])
def _multiply(
    out,  # as in products._multiply
    x,
    weight,  # descriptor of [experts * outputs, columns]
    x_scale,
    scale,
    factors,
    order,
    blocks,
    tiles,
    total,
    x_rows,
    x_stride,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKED: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    DTYPE: gl.constexpr = weight.dtype
    SPAN: gl.constexpr = 1024 // DTYPE.primitive_bitwidth  # of 128 bytes
    plan: gl.constexpr = Plan(OUTPUTS, COLUMNS, TOP_K, BLOCK_N, SPAN, STAGES, BLOCKED, ACT)
    gdc_launch_dependents()
    xs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, ROWS, SPAN], weight.layout)
    ws = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, SPAN], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 128)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    rings = Rings(xs, ws, full, free)
    ops = Operands(
        x, x_scale, weight, scale, factors, order, blocks, tiles, total, x_rows, x_stride
    )
    gl.warp_specialize(
        [
            (_consume, (out, ops, rings, 0, plan)),
            (_consume, (out, ops, rings, 1, plan)),
            (_produce, (ops, rings, plan)),
        ],
        [4, 4],
        [224, 56],
    )


_launch = Launcher(_multiply, max_registers=168)


def multiply(p: Product) -> None:
    """See ``products.multiply``; for weights in 16 bits, or in 8 with scales of blocks. Numbers of
    columns are multiples of 64, or of 128 in 8 bits; there are no biases."""
    codes, scale, *_ = parts(p.weight)
    x, x_scale = p.x, None
    is_fp8, act = isinstance(p.weight, Fp8Matrix), p.act[0]
    if is_fp8:
        x, x_scale = quantize_rows(x, blocked=True)
    columns = x.shape[1]
    # As much as fits into shared memory and registers, beside outputs.
    block_n, stages = (128, 5) if is_fp8 else (256, 3 if act is None else 4)
    shared, span = (FP8_SHARED, 128) if is_fp8 else (SHARED, 64)
    box = TensorDescriptor.from_tensor(codes.view(-1, columns), [block_n // 2, span], shared.value)
    tiles = cdiv(p.size, block_n)
    total = len(p.groups.blocks) * tiles
    _launch(
        (min(gpu_of(x.device).multiprocessors, total), 1, 1),
        (
            *(p.out, x, box, x_scale, scale, p.factors, p.groups.order, p.groups.blocks),
            *(tiles, total, len(x), x.stride(0)),
        ),
        (p.size, columns, p.top_k, block_n, stages, is_fp8, act),
        4,
    )
