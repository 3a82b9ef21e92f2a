"""The outputs of ``tma_split``, from sums in registers.

The rows of x are cut into pieces of a power of two; each is an operand of the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import debug_barrier

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, SHARED, weight_rows
from asyncllm.kernels.triton.waiting import MAX_POLLS, fail_after

#: The layout of gated outputs, [rows of x, 32].
HALF_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
#: The layout of sums that programs exchange, [rows of x, 64].
SLICE = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


@gluon.constexpr_function
def _pieces(block_m: int) -> tuple[int, ...]:
    first = min(1 << (block_m.bit_length() - 1), 128)
    return (first, *_pieces(block_m - first)) if block_m > first else (first,)


@gluon.constexpr_function
def count_pieces(block_m: int) -> int:
    """The number of pieces."""
    return len(_pieces(block_m))


@gluon.constexpr_function
def piece_rows(block_m: int, p: int) -> int:
    """Rows of a piece: powers of two up to 128, the largest first."""
    rows: int = _pieces(block_m)[p]
    return rows


@gluon.constexpr_function
def piece_start(block_m: int, p: int) -> int:
    """The first row of a piece."""
    return sum(_pieces(block_m)[:p])


@gluon.constexpr_function
def box_rows(block_m: int) -> int:
    """Rows that are copied at once: the smallest piece."""
    rows: int = _pieces(block_m)[-1]
    return rows


@gluon.jit
def store(sums, output, box, staging, arrived, part, first, plan: gl.constexpr):
    """Copy outputs to global memory, through the shared memory of the part's weights.

    Args:
        arrived: a barrier, for the residual.
        first: row of x.
    """
    BOX: gl.constexpr = box_rows(plan.block_m)
    OUTPUTS: gl.constexpr = ROWS if plan.act is None else ROWS // 2
    LAYOUT: gl.constexpr = SHARED if plan.act is None else HALF_SHARED
    boxes = staging._reinterpret(staging.dtype, [plan.block_m // BOX, BOX, OUTPUTS], LAYOUT)
    if plan.residual:
        debug_barrier()  # all warps have multiplied
        mbarrier.expect(arrived, plan.block_m * OUTPUTS * 2)
        for b in gl.static_range(plan.block_m // BOX):
            at = [first + b * BOX, part * OUTPUTS]
            tma.async_copy_global_to_shared(box, at, arrived, boxes.index(b))
        mbarrier.wait(arrived, 0)
    for p in gl.static_range(count_pieces(plan.block_m)):
        _stage(sums[p], output, staging, part, piece_start(plan.block_m, p), plan)
    fence_async_shared()
    debug_barrier()  # all threads have written
    for b in gl.static_range(plan.block_m // BOX):
        tma.async_copy_shared_to_global(box, [first + b * BOX, part * OUTPUTS], boxes.index(b))
    tma.store_wait(0)


@gluon.jit
def _stage(y, output, staging, part, FIRST: gl.constexpr, plan: gl.constexpr):
    """Bias, activation and residual of a piece, and its outputs to shared memory."""
    SIZE: gl.constexpr = y.shape[1]
    OUTPUTS: gl.constexpr = ROWS if plan.act is None else ROWS // 2
    LAYOUT: gl.constexpr = SHARED if plan.act is None else HALF_SHARED
    if plan.bias:
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
        rows = weight_rows(i, part, output.n, plan)
        y += gl.load(output.bias + rows).to(gl.float32)[:, None]
    if plan.act is not None:
        halves = gl.reshape(y, [ROWS // 16, 2, 8, SIZE])
        first, second = gl.split(gl.permute(halves, [0, 2, 3, 1]))
        y = gl.reshape(activate(first, plan.act) * second, [OUTPUTS, SIZE])
    pieces = staging._reinterpret(staging.dtype, [plan.block_m // SIZE, SIZE, OUTPUTS], LAYOUT)
    piece = pieces.index(FIRST // SIZE).permute((1, 0))
    if plan.residual:
        y += piece.load(y.type.layout).to(gl.float32)
    piece.store(y.to(staging.dtype))


@gluon.jit
def exchange(sums, output, part, split, plan: gl.constexpr):
    """Exchange sums through global memory; every program adds them up for its rows of x."""
    CELLS: gl.constexpr = plan.block_m * ROWS
    cells = output.partial + part * (plan.splits * CELLS)
    for p in gl.static_range(count_pieces(plan.block_m)):
        _share(sums[p], cells + split * CELLS + piece_start(plan.block_m, p) * ROWS)
    debug_barrier()  # the stores of all threads come before the arrival
    arrivals = output.arrivals + part
    arrived = gl.atomic_add(arrivals, 1, sem="acq_rel") + 1
    polls = 0
    while (arrived % 65536 < plan.splits) & (polls < MAX_POLLS):
        arrived = gl.atomic_add(arrivals, 0, sem="acquire")
        polls += 1
    fail_after(polls, arrivals)
    for p in gl.static_range(count_pieces(plan.block_m)):
        _add(output, cells, part, split, p, plan)
    left = gl.atomic_add(arrivals, 65536, sem="relaxed") // 65536
    if left == plan.splits - 1:
        gl.store(arrivals, 0)


@gluon.jit
def _share(y, cells):
    """Store [64, rows of x] as [rows of x, 64]."""
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))[:, None]
    m = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))[None, :]
    gl.store(cells + m * ROWS + i, y)


@gluon.jit
def _add(output, cells, part, split, P: gl.constexpr, plan: gl.constexpr):
    """Outputs of the program's rows of a piece, from the sums of all programs of the tile."""
    EACH: gl.constexpr = piece_rows(plan.block_m, P) // plan.splits
    CELLS: gl.constexpr = plan.block_m * ROWS
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SLICE))
    m = gl.arange(0, EACH, layout=gl.SliceLayout(1, SLICE))
    m += piece_start(plan.block_m, P) + split * EACH
    cells += m[:, None] * ROWS + n[None, :]
    n += part * ROWS
    at = output.out + m.to(gl.int64)[:, None] * output.stride + n[None, :]
    exists = (m < output.m)[:, None] & (n < output.n)[None, :]
    if plan.residual:
        old = gl.load(at, exists, other=0.0)
    y = gl.load(cells, cache_modifier=".cg")
    for s in gl.static_range(1, plan.splits):
        y += gl.load(cells + s * CELLS, cache_modifier=".cg")
    if plan.bias:
        y += gl.load(output.bias + gl.minimum(n, output.n - 1)).to(gl.float32)[None, :]
    if plan.residual:
        y += old.to(gl.float32)
    gl.store(at, y.to(output.out.dtype.element_ty), exists)
