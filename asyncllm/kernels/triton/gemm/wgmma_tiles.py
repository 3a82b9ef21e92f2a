"""Parts of the projection kernels for Hopper GPUs: operands and outputs.

The first operand of a warpgroup's product has 64 rows. These are rows of the weight, so that x, the
other operand, is padded to a power of two of rows, at least 8, not to 64. The result is [64, rows
of x].

Where tiles of 64 outputs would be too few programs, each row of the weight is cut into ``fold``
pieces: 64 / fold rows fill the 64 rows of an operand, and the pieces of x are rows of the other
operand. The tensor cores multiply all pieces by all, for which they have the time; only products
of equal pieces are added up.

In a gated projection, eight rows of the gate alternate with the eight rows of up for the same
outputs, so that both are sums of the same thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Scratch, cdiv, next_power_of_2

#: Rows of the first operand of a warpgroup's product.
ROWS = gl.constexpr(64)
#: Elements of 128 bytes, the greatest width of a copy to shared memory.
SPAN = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
GATED_SHARED = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
)


class Plan(NamedTuple):
    """Constants of a launch.

    Attributes:
        block_m: rows of x, padded.
        parts: 64-row operands of a program.
        fold: pieces of a row of the weight.
        splits: programs that share outputs, each with a part of the columns.
        bias, residual: whether there is one to add.
        act: None if the projection is not gated.
        warps: that multiply, four to a warpgroup.
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
    """The output [m, n], or [m, n / 2] if gated, and how to get there.

    Attributes:
        partial: float32 [tiles, splits, parts, rows, block_m]; sums of programs that share outputs.
        arrivals: int32 [tiles]; programs that have stored their sums. Zero before and after.
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
    """The layout of products [64, columns]; warpgroups divide the columns."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, min(columns // groups, 256), 16])


@gluon.constexpr_function
def output_layout(size: int, rows: int, warps: int) -> gl.BlockedLayout:
    """The layout of outputs [size, rows], whose first dimension is contiguous in memory."""
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
def wait(sums, COUNT: gl.constexpr, PENDING: gl.constexpr):
    """Wait until at most PENDING products are unfinished; a tuple of COUNT sums in and out."""
    if COUNT == 1:
        return (warpgroup_mma_wait(PENDING, deps=sums),)
    else:
        return warpgroup_mma_wait(PENDING, deps=sums)


@gluon.jit
def _output_at(output, part, plan: gl.constexpr):
    """Addresses of an operand's outputs, and a mask of those that exist."""
    SIZE: gl.constexpr = ROWS // plan.fold if plan.act is None else ROWS // plan.fold // 2
    OUT: gl.constexpr = output_layout(SIZE, plan.block_m, plan.warps)
    m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, OUT))[None, :]
    n = gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))[:, None] + part * SIZE
    limit = output.n if plan.act is None else output.n // 2
    return output.out + m.to(gl.int64) * output.stride + n, (m < output.m) & (n < limit)


@gluon.jit
def load_residual(output, tile, plan: gl.constexpr):
    """The residual of the program's outputs, by part."""
    olds: gl.tuple = ()
    if plan.residual:
        for p in gl.static_range(plan.parts):
            at, exists = _output_at(output, tile * plan.parts + p, plan)
            olds += (gl.load(at, exists, other=0.0),)
    return olds


@gluon.jit
def write(sums, factor, olds, output, tile, split, plan: gl.constexpr):
    """Write outputs; of programs that share some, the last one to arrive does.

    Args:
        sums: products by part, [64, fold * block_m].
        factor: None, or float32 [block_m], by which to multiply them first.
        olds: of ``load_residual``.
    """
    SIZE: gl.constexpr = ROWS // plan.fold
    OUTPUTS: gl.constexpr = SIZE if plan.act is None else SIZE // 2
    OUT: gl.constexpr = output_layout(OUTPUTS, plan.block_m, plan.warps)
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
    """The sums of all programs that share outputs, by part; all are requested at once."""
    totals: gl.tuple = ()
    for p in gl.static_range(plan.parts):
        y = gl.load(cells + p * CELLS, cache_modifier=".cg")
        for s in gl.static_range(1, plan.splits):
            y += gl.load(cells + (s * plan.parts + p) * CELLS, cache_modifier=".cg")
        totals += (y,)
    return totals


@gluon.jit
def _sum_pieces(sums, plan: gl.constexpr):
    """Add up products of equal pieces: [64, fold * block_m] -> [64 / fold, block_m]."""
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
    """Rows of x, padded; warpgroups divide them."""
    return max(2 * warps, next_power_of_2(rows))


def shared_sums(
    size: int, rows: int, splits: int, block_m: int, device: torch.device
) -> tuple[int, Tensor | None, Tensor | None]:
    """The number of tiles of ``rows`` rows of the weight, and ``Output``'s partial and arrivals."""
    tiles = cdiv(size, rows)
    if splits == 1:
        return tiles, None, None
    count = tiles * splits * rows * block_m
    return tiles, torch.empty(count, dtype=torch.float32, device=device), arrivals(device)


_scratch = Scratch()


def arrivals(device: torch.device) -> Tensor:
    """Counters that are zero whenever no kernel runs; all launches of a thread share them."""
    return _scratch.counters(1 << 16, device)


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
