"""Projections of a few to dozens of rows with small weights, which stay in shared memory.

Grid: tiles of 64 / fold outputs, splits of the columns. In Gluon, Triton's language of explicit
layouts and copies, since only there a program can have its whole weight copied to shared memory
before it waits for the kernel that writes x. It normalises x on the way: x times the norm's weight
goes to shared memory, where the tensor cores read both operands, and the squares of x are added up
meanwhile.

Measured on an H200 (docs/kernels.md): with 16 rows, half of the time of cuBLAS.
Every 32 KiB of x that a program reads add 0.5 to 0.8 us. Letting the next kernel request its
weights only after x has been requested saves 0.2 to 1.0 us.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.gemm.wgmma_tiles import (
    ROWS,
    SHARED,
    Output,
    Plan,
    load_residual,
    padded_rows,
    shared_sums,
    sums_layout,
    weight_rows,
    write,
)
from asyncllm.kernels.triton.launch import Launcher
from asyncllm.kernels.tuning import SmemResidentTile

#: Registers of a thread for the parts of x in flight.
X_REGISTERS = gl.constexpr(128)


@gluon.constexpr_function
def _vector_layout(columns: int, warps: int) -> gl.BlockedLayout:
    """The layout of operands in global memory, [rows, columns]: 16 bytes for each thread."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _eighths(vectors: gl.BlockedLayout) -> gl.SliceLayout:
    """The layout of [rows, columns / 8]: one value for 16 bytes."""
    threads, warps = vectors.threads_per_warp, vectors.warps_per_cta
    return gl.SliceLayout(2, gl.BlockedLayout([1, 1, 8], [*threads, 1], [*warps, 1], [2, 1, 0]))


@gluon.jit
def _load_gain(gain, column, k, FOLD: gl.constexpr):
    if FOLD == 1:
        return gl.load(gain + k)[None, :]
    else:
        return gl.load(gain + column[:, None] + k[None, :])


@gluon.jit
def _scale(x, gain, OFFSET: gl.constexpr):
    """x times the norm's weight."""
    if OFFSET:
        return (x.to(gl.float32) * (gain.to(gl.float32) + 1.0)).to(x.dtype)
    else:
        return x * gain


@gluon.jit
def _squares(x):
    """The squares of x, summed over the eight columns of a thread."""
    wide = x.to(gl.float32)
    return gl.sum(gl.reshape(wide * wide, [x.shape[0], x.shape[1] // 8, 8]), axis=2)


@gluon.jit(do_not_specialize=["M"])
def _smem_resident(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    gain,  # [K]
    partial,
    arrivals,
    M,
    N,
    out_stride,
    x_stride,
    weight_stride,
    K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    FOLD: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL_LATE: gl.constexpr,
    NORM: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACT: gl.constexpr,
    PDL: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    plan: gl.constexpr = Plan(BLOCK_M, 1, FOLD, SPLITS, BIAS, RESIDUAL, ACT, WARPS)
    COLUMNS: gl.constexpr = K // SPLITS // FOLD  # of a piece
    CHUNKS: gl.constexpr = COLUMNS // BLOCK_K
    X_ROWS: gl.constexpr = FOLD * BLOCK_M
    X_STAGES: gl.constexpr = min(2, CHUNKS) if NORM else CHUNKS
    VECTORS: gl.constexpr = _vector_layout(BLOCK_K, WARPS)
    SUMS: gl.constexpr = sums_layout(X_ROWS, WARPS)
    if not PDL_LATE:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    output = Output(out, bias, partial, arrivals, M, N, out_stride)
    dtype: gl.constexpr = x.dtype.element_ty
    ws = gl.allocate_shared_memory(dtype, [CHUNKS, ROWS, BLOCK_K], SHARED)
    xs = gl.allocate_shared_memory(dtype, [X_STAGES, X_ROWS, BLOCK_K], SHARED)

    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, VECTORS))
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, VECTORS))
    row = weight_rows(i, tile, N, plan) * weight_stride
    column = split * (FOLD * COLUMNS) + i // (ROWS // FOLD) * COLUMNS
    w_at = weight + (row + column)[:, None] + k[None, :]
    for c in gl.static_range(CHUNKS):
        async_copy.async_copy_global_to_shared(
            ws.index(c), w_at + c * BLOCK_K, eviction_policy="evict_first"
        )
        async_copy.commit_group()
    i = gl.arange(0, X_ROWS, layout=gl.SliceLayout(1, VECTORS))
    row = gl.minimum(i % BLOCK_M, M - 1).to(gl.int64) * x_stride
    column = split * (FOLD * COLUMNS) + i // BLOCK_M * COLUMNS
    x_at = x + (row + column)[:, None] + k[None, :]
    gains: gl.tuple = ()
    if NORM:
        for c in gl.static_range(CHUNKS):
            gains += (_load_gain(gain + c * BLOCK_K, column, k, FOLD),)
    gdc_wait()

    AHEAD: gl.constexpr = min(CHUNKS, max(X_REGISTERS * 64 * WARPS // (X_ROWS * BLOCK_K), 1))
    values: gl.tuple = ()
    if NORM:
        for c in gl.static_range(AHEAD):
            values += (gl.load(x_at + c * BLOCK_K),)
    else:
        for c in gl.static_range(CHUNKS):
            async_copy.async_copy_global_to_shared(xs.index(c), x_at + c * BLOCK_K)
            async_copy.commit_group()
    olds = load_residual(output, tile, plan)
    if PDL_LATE:
        gdc_launch_dependents()
    if NORM:
        debug_barrier()  # or the assembler starts some loads only after others have arrived

    sums = warpgroup_mma_init(gl.zeros([ROWS, X_ROWS], gl.float32, layout=SUMS))
    squares = gl.zeros([X_ROWS, BLOCK_K // 8], gl.float32, layout=_eighths(VECTORS))
    for c in gl.static_range(CHUNKS):
        if NORM:
            xs.index(c % X_STAGES).store(_scale(values[c], gains[c], OFFSET))
        async_copy.wait_group(CHUNKS - 1 - c)
        if NORM and c > 0:
            # With the barrier below: nobody still reads the buffer of the next block of x.
            sums = warpgroup_mma_wait(0, deps=(sums,))
        fence_async_shared()
        debug_barrier()
        sums = warpgroup_mma(
            ws.index(c), xs.index(c % X_STAGES).permute((1, 0)), sums, is_async=True
        )
        if NORM:
            if c + AHEAD < CHUNKS:
                values += (gl.load(x_at + (c + AHEAD) * BLOCK_K),)
            squares += _squares(values[c])
    sums = warpgroup_mma_wait(0, deps=(sums,))
    factor = None
    if NORM:
        square = gl.sum(gl.reshape(gl.sum(squares, axis=1), [FOLD, BLOCK_M]), axis=0)
        factor = gl.rsqrt(square / K + EPS)
    write((sums,), factor, olds, output, tile, split, plan)


_launch = Launcher(_smem_resident)


def smem_resident(tile: SmemResidentTile, p: Projection[Tensor]) -> Tensor:
    """Launch the kernel.

    Rows of x and of the weight must be aligned to 32 bytes; N must be a multiple of 16 with an
    activation. Not for a norm together with splits.
    """
    x, weight = p.x, p.weight
    out = p.output()
    size, columns = weight.shape
    block_m = padded_rows(len(x), tile.warps)
    tiles, partial, arrivals = shared_sums(size, 64 // tile.fold, tile.splits, block_m, x.device)
    constants = (
        *(columns, block_m, tile.block_k, tile.fold, tile.splits, tile.pdl_late),
        *(*p.prologue, *p.epilogue),
    )
    args = (
        *(out, x, weight, p.bias, p.gain, partial, arrivals),
        *(len(x), size, out.stride(0), x.stride(0), weight.stride(0)),
    )
    _launch((tiles, tile.splits, 1), args, constants, tile.warps)
    return out
