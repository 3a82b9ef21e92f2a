"""Projections of dozens of rows, on the tensor cores, by way of shared memory.

The weight is the first operand of the products, so that their other side is padded to a power of
two of rows rather than to 64. SPLITS programs may share a tile of outputs, each with its part of
the columns; the one that comes last adds their sums, always in the same order.

On an H200 with 32 rows, each in a chain of its own in a CUDA graph, against what reading the weight
takes at 4.3 TB/s; what normalises x is included:

| weight | microseconds | reading | cuBLAS, with the kernels around it |
|--|--|--|--|
| 6144 x 1024, norm, gated | 7.5 | 2.9 | 8.8 |
| 24576 x 4096, norm, gated | 50.2 | 46.8 | 52.8 |
| 4096 x 12288, residual | 28.4 | 23.4 | 30.1 |
| 151936 x 4096, norm | 289 | 289 | 296 |
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.epilogue import finish, output_tile, prefetch_rows, weight_rows
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.tuning import SkinnyTile


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    partial,  # float32 [tiles, SPLITS, rows of the tile, BLOCK_M]
    arrivals,  # int32 [tiles], zero before and after
    M,
    N,
    out_stride,
    x_stride,
    weight_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACT is not None
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    COLUMNS: tl.constexpr = K // SPLITS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, GATED)
    w_start = weight + rows * weight_stride + split * COLUMNS
    if PDL:
        # As much as the loop loads before its first product.
        prefetch_rows(w_start, min(COLUMNS, STAGES * BLOCK_K))
        tl.extra.cuda.gdc_wait()

    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    w_at = w_start[:, None] + k[None, :]
    x_at = x + m[None, :].to(tl.int64) * x_stride + split * COLUMNS + k[:, None]
    has_row = (m < M)[None, :]
    out_at, is_output = output_tile(out, tile, M, N, out_stride, BLOCK_M, BLOCK_N, GATED)
    if RESIDUAL:
        old = tl.load(out_at, is_output, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + start, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(x_at + start, has_row, other=0.0), acc, input_precision="ieee")

    is_last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = ROWS * BLOCK_M
        cells = partial + tile * SPLITS * SIZE
        cells += tl.arange(0, ROWS)[:, None] * BLOCK_M + m[None, :]
        tl.store(cells + split * SIZE, acc)
        tl.debug_barrier()  # the stores of all threads come before the arrival
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
            for i in tl.static_range(SPLITS):
                acc += tl.load(cells + i * SIZE, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
        y = finish(acc, bias, tile, N, BLOCK_N, BIAS, ACT)
        if RESIDUAL:
            y += old.to(tl.float32)
        tl.store(out_at, y.to(out.dtype.element_ty), is_output)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Arrivals at the tiles of a launch: zero whenever no kernel runs.

    Launches share them, so they must be on one stream. The first one must not be captured.
    """
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


_launch = Launcher(_skinny_kernel)


def skinny(
    tile: SkinnyTile,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: str | None,
    out: Tensor,
    *,
    add: bool,
) -> None:
    """``linear`` into ``out`` [M, N or N / 2], to which it is added if ``add``."""
    block_m = max(8, next_power_of_2(len(x)))
    tiles = cdiv(out.shape[1], tile.block_n)
    partial = arrivals = None
    if tile.splits > 1:
        rows = tile.block_n * (1 if act is None else 2)
        size = tiles * tile.splits * rows * block_m
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    constants = (
        *(weight.shape[1], block_m, tile.block_n, tile.block_k, tile.splits, tile.stages),
        *(bias is not None, add, act),
    )
    args = (
        *(out, x, weight, bias, partial, arrivals),
        *(len(x), weight.shape[0], out.stride(0), x.stride(0), weight.stride(0)),
    )
    _launch((tiles, tile.splits, 1), args, constants, tile.warps)
