"""Projections of few rows, on the tensor cores, straight from registers.

A program computes BLOCK_N outputs of all rows of x; its warps divide the columns. A thread loads 16
bytes at a time of the weight and of x, and these registers are its part of the operands of the
tensor cores' product. This permutes the columns of both operands alike, which leaves their product
as it is. So a program requests its weight before it waits for the kernel that writes x, and only
the sums of the warps pass through shared memory.

Measured on an H200 (docs/kernels.md): with 8 rows, half of the time of cuBLAS.
Loading x and the residual at once, not piece by piece as the compiler would, and letting the next
kernel request its weights only then, saved 0.4 to 0.9 of each. On Hopper GPUs ``smem_resident`` is
faster from four rows on, except for the second of these.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.gemm.epilogue import finish, output_tile, weight_rows
from asyncllm.kernels.triton.gemm.projection import Projection
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.tuning import RegisterSkinnyTile


@triton.jit
def _operand(t, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """[GROUPS * blocks * PARTS * 8, 32] -> [PARTS, GROUPS * 8, blocks * 32], within each thread.

    Of the eight consecutive columns of a thread, the first four belong to one product of 16 columns
    and the others to the next. Blocks of 32 columns go to the parts in turn.
    """
    BLOCKS: tl.constexpr = t.shape[0] // (GROUPS * PARTS * 8)
    t = tl.reshape(t, [GROUPS, BLOCKS, PARTS, 8, 4, 2, 2, 2])
    t = tl.permute(t, [2, 0, 3, 1, 5, 6, 4, 7])
    return tl.reshape(t, [PARTS, GROUPS * 8, BLOCKS * 32])


@triton.jit
def _scale(x, squares, gain, OFFSET: tl.constexpr):
    """x times the norm's weight, and ``squares`` plus the squares of x, summed by thread."""
    wide = x.to(tl.float32)
    squares += tl.sum(tl.reshape(wide * wide, [x.shape[0], 4, 8]), axis=2)
    if OFFSET:
        return (wide * (gain.to(tl.float32) + 1.0)).to(x.dtype), squares
    else:
        return x * gain, squares


@triton.jit(do_not_specialize=["M"])
def _register_skinny(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    gain,  # [K]
    M,
    N,
    out_stride,
    x_stride,
    weight_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRELOADED: tl.constexpr,
    WARPS: tl.constexpr,
    CHAINS: tl.constexpr,
    PDL_LATE: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACT is not None
    CHUNKS: tl.constexpr = K // BLOCK_K
    BLOCKS: tl.constexpr = BLOCK_K // 32
    W_GROUPS: tl.constexpr = BLOCK_N // 8 * (2 if GATED else 1)
    X_GROUPS: tl.constexpr = BLOCK_M // 8
    PARTS: tl.constexpr = WARPS * CHAINS
    if PDL and not PDL_LATE:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    # Tiles [rows, 32]: eight rows of the matrix for each block of 32 columns.
    lane = tl.arange(0, 32)[None, :]
    i = tl.arange(0, W_GROUPS * BLOCKS * 8)[:, None]
    rows = weight_rows(i // (BLOCKS * 8) * 8 + i % 8, tile, N, BLOCK_N, GATED)
    w_at = weight + rows * weight_stride + i // 8 % BLOCKS * 32 + lane
    i = tl.arange(0, X_GROUPS * BLOCKS * 8)[:, None]
    m = i // (BLOCKS * 8) * 8 + i % 8
    column = i // 8 % BLOCKS * 32 + lane
    x_at = x + m.to(tl.int64) * x_stride + column
    has_row = m < M

    acc = tl.zeros([PARTS, W_GROUPS * 8, BLOCK_M], tl.float32)
    squares = tl.zeros([X_GROUPS * BLOCKS * 8, 4], tl.float32)
    ws: tl.tuple = ()
    for c in tl.static_range(CHUNKS if PRELOADED else 1):
        ws += (tl.load(w_at + c * BLOCK_K, eviction_policy="evict_first"),)
    gains: tl.tuple = ()
    if NORM and PRELOADED:
        for c in tl.static_range(CHUNKS):
            gains += (tl.load(gain + column + c * BLOCK_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()

    out_at, is_output = output_tile(out, tile, M, N, out_stride, BLOCK_M, BLOCK_N, GATED)
    if RESIDUAL:
        old = tl.load(out_at, is_output, other=0.0)
    if PRELOADED:
        xs: tl.tuple = ()
        for c in tl.static_range(CHUNKS):
            xs += (tl.load(x_at + c * BLOCK_K, has_row, other=0.0),)
        if PDL and PDL_LATE:
            tl.extra.cuda.gdc_launch_dependents()
        # A loop of one round, which the compiler cannot know. Otherwise it would save registers by
        # loading x piece by piece between the products, and wait for every piece.
        for _ in tl.range(0, tl.minimum(M, 1), num_stages=1):
            tl.debug_barrier()
            for c in tl.static_range(CHUNKS):
                v = xs[c]
                if NORM:
                    v, squares = _scale(v, squares, gains[c], OFFSET)
                v = tl.permute(_operand(v, X_GROUPS, PARTS), [0, 2, 1])
                acc = tl.dot(_operand(ws[c], W_GROUPS, PARTS), v, acc)
    else:
        w = ws[0]
        v = tl.load(x_at, has_row, other=0.0)
        if PDL and PDL_LATE:
            tl.extra.cuda.gdc_launch_dependents()
        for c in tl.range(0, CHUNKS, num_stages=1):
            if NORM:
                v, squares = _scale(v, squares, tl.load(gain + column + c * BLOCK_K), OFFSET)
            v = tl.permute(_operand(v, X_GROUPS, PARTS), [0, 2, 1])
            acc = tl.dot(_operand(w, W_GROUPS, PARTS), v, acc)
            start = tl.minimum(c + 1, CHUNKS - 1) * BLOCK_K
            w = tl.load(w_at + start, eviction_policy="evict_first")
            v = tl.load(x_at + start, has_row, other=0.0)

    y = tl.sum(acc, axis=0)
    if NORM:
        squares = tl.reshape(tl.sum(squares, axis=1), [X_GROUPS, BLOCKS, 8])
        squares = tl.reshape(tl.sum(squares, axis=1), [BLOCK_M])
        y *= tl.rsqrt(squares / K + EPS)[None, :]
    y = finish(y, bias, tile, N, BLOCK_N, BIAS, ACT)
    if RESIDUAL:
        y += old.to(tl.float32)
    tl.store(out_at, y.to(out.dtype.element_ty), is_output)


_launch = Launcher(_register_skinny)


def register_skinny(tile: RegisterSkinnyTile, p: Projection[Tensor]) -> Tensor:
    """Launch the kernel for a 16-bit x and weight."""
    x, weight = p.x, p.weight
    out = p.output()
    constants = (
        *(weight.shape[1], max(8, next_power_of_2(len(x)))),
        *(tile.block_n, tile.block_k, tile.preloads, tile.warps, tile.chains, tile.pdl_late),
        *(*p.prologue, *p.epilogue),
    )
    args = (
        *(out, x, weight, p.bias, p.gain),
        *(len(x), weight.shape[0], out.stride(0), x.stride(0), weight.stride(0)),
    )
    _launch((cdiv(out.shape[1], tile.block_n), 1, 1), args, constants, tile.warps)
    return out
