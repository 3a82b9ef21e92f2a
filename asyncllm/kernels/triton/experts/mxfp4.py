"""Products of dozens of rows and more with experts in MXFP4, on Hopper GPUs.

As ``prompts``, but with 64 rows of the weight as the first operand of a warpgroup's products, which
may come from registers: codes go from shared memory to registers, where they become 16-bit numbers,
and never back. They are packed so that a thread finds those of its own columns in its words
(``kernels.quantized``).

On an H200, 8,192 tokens of gpt-oss-20b take 3.1 ms a layer; ``products`` took 6.0.
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

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.codes import MXFP4_WORDS, mxfp4_operand
from asyncllm.kernels.triton.experts.product import Product
from asyncllm.kernels.triton.experts.products import activated
from asyncllm.kernels.triton.experts.prompts import source_rows
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, SHARED, output_layout
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import Mxfp4Matrix

#: From so many rows of an expert on, this kernel takes less time than ``products``.
LEAST_ROWS = 6
#: Columns of a block, and words of a row of it.
SPAN, WORDS = gl.constexpr(128), gl.constexpr(16)
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
PAIRED_CODES = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=4)
)


class Plan(NamedTuple):
    """Constants of a launch; see ``prompts.Plan``.

    Attributes:
        block_m: rows of x of a tile.
        parts: warpgroups that multiply.
    """

    outputs: Any
    columns: Any
    top_k: Any
    block_m: Any
    parts: Any
    stages: Any
    act: Any
    alpha: Any
    limit: Any
    bias: Any


class Operands(NamedTuple):
    """What is multiplied, and the tiles; see ``prompts.Operands``."""

    x: Any
    weight: Any
    scale: Any
    bias: Any
    factors: Any
    order: Any
    blocks: Any
    tiles: Any
    total: Any
    x_stride: Any


class Rings(NamedTuple):
    """Shared memory.

    Attributes:
        w: by part, [stages, 64, words].
        x: [stages, block_m, 128].
        full: a barrier for each stage: its blocks have arrived.
        free: a barrier for each stage: all parts have multiplied them.
    """

    w: Any
    x: Any
    full: Any
    free: Any


@gluon.constexpr_function
def _sums(columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _produce(ops, rings, plan: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = (plan.columns + SPAN - 1) // SPAN
    i = gl.arange(0, plan.block_m, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, SPAN, layout=gl.SliceLayout(0, LAYOUT))
    gdc_wait()
    turn = 0
    for t in range(gl.program_id(0), ops.total, gl.num_programs(0)):
        block = t // ops.tiles
        tile = t % ops.tiles
        expert = gl.load(ops.blocks + block * 3)
        if expert >= 0:
            first = gl.load(ops.blocks + block * 3 + 1)
            end = gl.load(ops.blocks + block * 3 + 2)
            source = source_rows(first + i, end, ops, plan)
            at = ops.x + source.to(gl.int64)[:, None] * ops.x_stride + k[None, :]
            n = expert * plan.outputs + tile * (ROWS * plan.parts)
            for b in range(BLOCKS):
                stage = turn % plan.stages
                full = rings.full.index(stage)
                mbarrier.wait(rings.free.index(stage), (turn // plan.stages & 1) ^ 1)
                mbarrier.expect(full, plan.parts * ROWS * WORDS * 4)
                for p in gl.static_range(plan.parts):
                    w = rings.w[p]
                    if plan.act is None:
                        where = [n + p * ROWS, b * WORDS]
                    else:
                        w = w._reinterpret(
                            w.dtype, [plan.stages, ROWS // 16, 2, 8, WORDS], PAIRED_CODES
                        )
                        where = [n // 16 + p * (ROWS // 16), 0, 0, b * WORDS]
                    tma.async_copy_global_to_shared(ops.weight, where, full, w.index(stage))
                x = rings.x.index(stage)
                if plan.columns % SPAN == 0:
                    async_copy.async_copy_global_to_shared(x, at + b * SPAN)
                else:
                    inside = (b * SPAN + k < plan.columns)[None, :] & (i >= 0)[:, None]
                    async_copy.async_copy_global_to_shared(x, at + b * SPAN, inside)
                async_copy.mbarrier_arrive(full, increment_count=False)
                turn += 1
    async_copy.wait_group(0)


@gluon.jit
def weight_rows(i, plan: gl.constexpr):
    """The rows of a part of the weight of rows i in shared memory, where eight rows of the gate, if
    there is one, alternate with the eight of up."""
    if plan.act is None:
        return i
    else:
        return i // 16 * 16 + i % 8 * 2 + i // 8 % 2


@gluon.jit
def _consume(out, ops, rings, PART: gl.constexpr, plan: gl.constexpr):
    SUMS: gl.constexpr = _sums(plan.block_m)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BLOCKS: gl.constexpr = (plan.columns + SPAN - 1) // SPAN
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MXFP4_WORDS))
    gdc_wait()
    turn = 0
    for t in range(gl.program_id(0), ops.total, gl.num_programs(0)):
        block = t // ops.tiles
        tile = t % ops.tiles
        expert = gl.load(ops.blocks + block * 3)
        if expert >= 0:
            first = gl.load(ops.blocks + block * 3 + 1)
            end = gl.load(ops.blocks + block * 3 + 2)
            part = tile * plan.parts + PART
            # Of rows past the last one, the numbers are not written.
            row = gl.minimum(part * ROWS + weight_rows(i, plan), plan.outputs - 1)
            s_at = ops.scale + (expert * plan.outputs + row) * BLOCKS
            sums = gl.zeros([ROWS, plan.block_m], gl.float32, layout=SUMS)
            scales = gl.load(s_at)
            for b in range(BLOCKS):
                later = gl.load(s_at + gl.minimum(b + 1, BLOCKS - 1))
                stage = turn % plan.stages
                mbarrier.wait(rings.full.index(stage), turn // plan.stages & 1)
                words = rings.w[PART].index(stage).load(MXFP4_WORDS)
                w = gl.convert_layout(mxfp4_operand(words, scales), OPERAND)
                fence_async_shared()  # the tensor cores see what threads have written
                x = rings.x.index(stage).permute((1, 0))
                sums = warpgroup_mma(w, x, sums, is_async=True)
                # Products read the registers of an operand until they are waited for.
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(rings.free.index(stage), count=1)
                scales = later
                turn += 1
            SIZE: gl.constexpr = ROWS if plan.act is None else ROWS // 2
            layout: gl.constexpr = output_layout(SIZE, plan.block_m, 4)
            write_outputs(out, sums, ops, expert, part, first, end, layout, plan)


@gluon.jit
def write_outputs(out, y, ops, expert, part, first, end, LAYOUT: gl.constexpr, plan: gl.constexpr):
    """The outputs of the sums of a part of the weight's rows, [rows, block_m]; LAYOUT: to store."""
    GATED: gl.constexpr = plan.act is not None
    ROWS: gl.constexpr = y.shape[0]
    SIZE: gl.constexpr = ROWS // 2 if GATED else ROWS
    LIMIT: gl.constexpr = plan.outputs // 2 if GATED else plan.outputs
    if plan.bias:
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
        row = gl.minimum(part * ROWS + weight_rows(i, plan), plan.outputs - 1)
        y += gl.load(ops.bias + expert * plan.outputs + row).to(gl.float32)[:, None]
    if GATED:
        halves = gl.reshape(y, [ROWS // 16, 2, 8, plan.block_m])
        gate, up = gl.split(gl.permute(halves, [0, 2, 3, 1]))
        y = gl.reshape(activated(gate, up, plan.act, plan.alpha, plan.limit), [SIZE, plan.block_m])
    else:
        m = first + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, y.type.layout))
        choice = gl.load(ops.order + gl.minimum(m, end - 1))
        y = y * gl.load(ops.factors + choice).to(gl.float32)[None, :]
    y = gl.convert_layout(y.to(out.dtype.element_ty), LAYOUT)
    m = first + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, LAYOUT))
    place = m if GATED else gl.load(ops.order + gl.minimum(m, end - 1))
    n = part * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT))
    at = out + place.to(gl.int64)[None, :] * LIMIT + n[:, None]
    gl.store(at, y, (m < end)[None, :] & (n < LIMIT)[:, None])


@gluon.jit(do_not_specialize=["tiles", "total"])
def _multiply(
    out,
    x,
    weight,  # descriptor of words [experts * outputs, columns / 8], or [.. / 16, 2, 8, ..]
    scale,  # int32 [experts * outputs, columns / 128]
    bias,
    factors,
    order,
    blocks,
    tiles,
    total,
    x_stride,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    ACT: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(
        OUTPUTS, COLUMNS, TOP_K, BLOCK_M, PARTS, STAGES, ACT, ALPHA, LIMIT, BIAS
    )
    gdc_launch_dependents()
    ws: gl.tuple = ()
    for _ in gl.static_range(PARTS):
        ws += (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], CODES),)
    xs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BLOCK_M, SPAN], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 128)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()
    rings = Rings(ws, xs, full, free)
    ops = Operands(x, weight, scale, bias, factors, order, blocks, tiles, total, x_stride)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_consume, (out, ops, rings, 0, plan)),
                (_consume, (out, ops, rings, 1, plan)),
                (_produce, (ops, rings, plan)),
            ],
            [4, 4],
            [224, 56] if BLOCK_M > 32 else [96, 48],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (out, ops, rings, 0, plan)),
                (_consume, (out, ops, rings, 1, plan)),
                (_consume, (out, ops, rings, 2, plan)),
                (_produce, (ops, rings, plan)),
            ],
            [4, 4, 4],
            [152, 152, 56],
        )


_launches = {
    registers: Launcher(_multiply, max_registers=registers) for registers in (80, 128, 168)
}


class Mxfp4Tile(NamedTuple):
    """How programs compute.

    Attributes:
        parts: 64 rows of the weight each, two or three.
        stages: of the ring.
        programs: of a multiprocessor.
    """

    parts: int
    stages: int
    programs: int


def choose_tile(each: float) -> tuple[int, Mxfp4Tile]:
    """Rows of a block, and the tile, for so many rows of an expert: the best of a dozen."""
    if each <= 12:
        return 16, Mxfp4Tile(2, 6, 2)
    return (64, Mxfp4Tile(3, 4, 1)) if each <= 192 else (128, Mxfp4Tile(2, 4, 1))


def multiply(p: Product, tile: Mxfp4Tile) -> None:
    """See ``products.multiply``; gate and up are paired."""
    assert isinstance(p.weight, Mxfp4Matrix)
    act, _, alpha, limit = p.act
    words: Tensor = p.weight.packed.view(torch.int32)
    if act is None:
        box = TensorDescriptor.from_tensor(words, [64, WORDS.value], CODES.value)
    else:
        pairs = words.view(len(words) // 16, 8, 2, -1).permute(0, 2, 1, 3)
        box = TensorDescriptor.from_tensor(pairs, [4, 2, 8, WORDS.value], PAIRED_CODES.value)
    order, blocks, block = p.groups
    tiles = cdiv(p.size, 64 * tile.parts)
    total = len(blocks) * tiles
    registers = 128 if tile.parts == 3 else 80 if block <= 32 else 168
    _launches[registers](
        (min(gpu_of(p.x.device).multiprocessors * tile.programs, total), 1, 1),
        (
            *(p.out, p.x, box, p.weight.scale.view(torch.int32), p.bias, p.factors),
            *(order, blocks, tiles, total, p.x.stride(0)),
        ),
        (
            *(p.size, p.x.shape[1], p.top_k, block, tile.parts, tile.stages),
            *(act, alpha, limit, p.bias is not None),
        ),
        4,
    )
