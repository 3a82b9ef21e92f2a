"""What the projection kernels for Hopper GPUs have in common: operands and outputs.

The first operand of a product are 64 rows: those of the weight, so that the other operand, x, is
padded to a power of two of rows, at least 8, and not to 64. The result is [64, rows of x].

Where tiles of 64 outputs would be too few programs, ``fold`` says in how many pieces each row of
the weight is: 64 / fold rows are 64 of an operand, and the same pieces of x are as many rows of the
other. Of the products of all with all, those of equal pieces are summed up; tensor cores have the
time for the others.

Of a gated projection, eight rows of the gate and the eight others of the same outputs take turns:
so both are sums of the same thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import cdiv, next_power_of_2

#: Rows of the first operand of a warpgroup's product.
ROWS = gl.constexpr(64)
#: Elements of 128 bytes, which is how wide a copy to shared memory can be.
SPAN = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
GATED_SHARED = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
)


class Plan(NamedTuple):
    """Constants of a launch.

    Attributes:
        block_m: rows of x, padded.
        parts: operands of 64 rows of a program.
        fold: pieces of a row.
        splits: programs that share outputs, each with its part of the columns.
        bias, residual: whether there is one to add.
        act: None if the projection is not gated.
        warps: of those that multiply, four to a warpgroup.
    """

    block_m: Any
    parts: Any
    fold: Any
    splits: Any
    bias: Any
    residual: Any
    act: Any
    warps: Any


class Output(NamedTuple):
    """Where outputs go: [m, n], or [m, n / 2] if gated.

    Attributes:
        partial: float32 [tiles, splits, parts, rows, block_m]; sums of programs that share outputs.
        arrivals: int32 [tiles], zero before and after.
    """

    out: Any
    bias: Any
    partial: Any
    arrivals: Any
    m: Any
    n: Any
    stride: Any


@gluon.constexpr_function
def sums_layout(columns: int, warps: int) -> gl.NVMMADistributedLayout:
    """Of products, [64, columns]; several warpgroups have a part of the columns each."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, min(columns // groups, 256), 16])


@gluon.constexpr_function
def _output_layout(size: int, rows: int, warps: int) -> gl.BlockedLayout:
    """Of outputs, [size, rows], of which rows are contiguous in memory."""
    each = max(1, min(8, size * rows // (32 * warps)))
    lanes = min(size // each, 32)
    return gl.BlockedLayout([each, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def weight_rows(i, part, n, plan: gl.constexpr):
    """The weight's rows, int64, of rows i of an operand; past the end, the last row again."""
    SIZE: gl.constexpr = ROWS // plan.fold
    i = i % SIZE
    if plan.act is None:
        return gl.minimum(part * SIZE + i, n - 1).to(gl.int64)
    else:
        row = gl.minimum(part * (SIZE // 2) + i // 16 * 8 + i % 8, n // 2 - 1)
        return (row + i // 8 % 2 * (n // 2)).to(gl.int64)


@gluon.jit
def _output_at(output, part, plan: gl.constexpr):
    """Addresses of an operand's outputs, and which of them exist."""
    SIZE: gl.constexpr = ROWS // plan.fold if plan.act is None else ROWS // plan.fold // 2
    OUT: gl.constexpr = _output_layout(SIZE, plan.block_m, plan.warps)
    m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, OUT))[None, :]
    n = gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))[:, None] + part * SIZE
    limit = output.n if plan.act is None else output.n // 2
    return output.out + m.to(gl.int64) * output.stride + n, (m < output.m) & (n < limit)


@gluon.jit
def load_residual(output, tile, plan: gl.constexpr):
    """What the program's outputs are added to."""
    olds: gl.tuple = ()
    if plan.residual:
        for p in gl.static_range(plan.parts):
            at, exists = _output_at(output, tile * plan.parts + p, plan)
            olds += (gl.load(at, exists, other=0.0),)
    return olds


@gluon.jit
def write(sums, factor, olds, output, tile, split, plan: gl.constexpr):
    """From products to outputs; of programs that share some, in the one that comes last.

    Args:
        sums: by part, [64, fold * block_m].
        factor: float32 [block_m], by which to multiply them first; or None.
        olds: see ``load_residual``.
    """
    SIZE: gl.constexpr = ROWS // plan.fold
    OUTPUTS: gl.constexpr = SIZE if plan.act is None else SIZE // 2
    OUT: gl.constexpr = _output_layout(OUTPUTS, plan.block_m, plan.warps)
    ys: gl.tuple = ()
    for p in gl.static_range(plan.parts):
        ys += (_sum_pieces(sums[p], plan),)
    layout: gl.constexpr = ys[0].type.layout
    i = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, layout))
    cells = i[:, None] * plan.block_m + m[None, :]
    CELLS: gl.constexpr = SIZE * plan.block_m
    is_last = True
    if plan.splits > 1:
        cells = output.partial + tile * (plan.splits * plan.parts * CELLS) + cells
        for p in gl.static_range(plan.parts):
            gl.store(cells + (split * plan.parts + p) * CELLS, ys[p])
        debug_barrier()  # the stores of all threads come before the arrival
        is_last = gl.atomic_add(output.arrivals + tile, 1, sem="acq_rel") == plan.splits - 1
    if is_last:
        if plan.splits > 1:
            gl.store(output.arrivals + tile, 0)
            ys = _add_splits(cells, CELLS, plan)
        for p in gl.static_range(plan.parts):
            y = ys[p]
            if factor is not None:
                y *= gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
            if plan.bias:
                rows = weight_rows(i, tile * plan.parts + p, output.n, plan)
                y += gl.load(output.bias + rows).to(gl.float32)[:, None]
            if plan.act is not None:
                halves = gl.reshape(y, [SIZE // 16, 2, 8, plan.block_m])
                first, second = gl.split(gl.permute(halves, [0, 2, 3, 1]))
                y = gl.reshape(activate(first, plan.act) * second, [SIZE // 2, plan.block_m])
            y = gl.convert_layout(y, OUT)
            if plan.residual:
                y += olds[p].to(gl.float32)
            at, exists = _output_at(output, tile * plan.parts + p, plan)
            gl.store(at, y.to(output.out.dtype.element_ty), exists)


@gluon.jit
def _add_splits(cells, CELLS: gl.constexpr, plan: gl.constexpr):
    """The sums of all programs that share outputs, by part; all of them asked for at once."""
    totals: gl.tuple = ()
    for p in gl.static_range(plan.parts):
        y = gl.load(cells + p * CELLS, cache_modifier=".cg")
        for s in gl.static_range(1, plan.splits):
            y += gl.load(cells + (s * plan.parts + p) * CELLS, cache_modifier=".cg")
        totals += (y,)
    return totals


@gluon.jit
def _sum_pieces(sums, plan: gl.constexpr):
    """[64, fold * block_m] -> [64 / fold, block_m]: the sums of equal pieces."""
    if plan.fold == 1:
        return sums
    else:
        SIZE: gl.constexpr = ROWS // plan.fold
        COLUMNS: gl.constexpr = plan.fold * plan.block_m
        layout: gl.constexpr = sums.type.layout
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None] // SIZE
        j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :] // plan.block_m
        sums = gl.where(i == j, sums, 0.0)
        sums = gl.sum(gl.reshape(sums, [ROWS, plan.fold, plan.block_m]), axis=1)
        return gl.sum(gl.reshape(sums, [plan.fold, SIZE, plan.block_m]), axis=0)


def padded_rows(rows: int, warps: int) -> int:
    """Of x; each warpgroup has a part of them."""
    return max(2 * warps, next_power_of_2(rows))


def shared_sums(
    size: int, rows: int, splits: int, block_m: int, device: torch.device
) -> tuple[int, Tensor | None, Tensor | None]:
    """How many tiles of so many rows a weight has, and ``Output``'s partial and arrivals."""
    tiles = cdiv(size, rows)
    if splits == 1:
        return tiles, None, None
    count = tiles * splits * rows * block_m
    return tiles, torch.empty(count, dtype=torch.float32, device=device), arrivals(device)


@cache
def arrivals(device: torch.device) -> Tensor:
    """Arrivals at the tiles of a launch: zero whenever no kernel runs.

    Launches share them, so they must be on one stream. The first one must not be captured.
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def boxes_of_x(x: Tensor, rows: int) -> TensorDescriptor:
    """x for copies of ``rows`` rows and 64 columns at a time."""
    return TensorDescriptor.from_tensor(x, [rows, SPAN.value], SHARED.value)


def boxes_of_weight(p: Projection[Tensor], rows: int) -> TensorDescriptor:
    """The weight for copies of ``rows`` rows and 64 columns at a time; see ``weight_rows``."""
    if p.act is None:
        return TensorDescriptor.from_tensor(p.weight, [rows, SPAN.value], SHARED.value)
    size, columns = p.weight.shape
    halves = p.weight.view(2, size // 16, 8, columns).permute(1, 0, 2, 3)
    return TensorDescriptor.from_tensor(halves, [rows // 16, 2, 8, SPAN.value], GATED_SHARED.value)
