"""Products of some rows with a 4-bit weight, through shared memory.

The weight is the first operand, so that rows of x are padded to a multiple of 8 rather than 16. The
warps of a program divide its outputs (by warpgroup instructions) or, where there are few of them,
the columns. SPLITS programs share a tile of outputs, which the one that comes last adds up in a
fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.int4 import Int4Matrix
from asyncllm.kernels.triton.epilogue import finish, weight_rows
from asyncllm.kernels.triton.fragments import dot
from asyncllm.kernels.triton.int4_codes import offset_codes, subtract, unpack
from asyncllm.kernels.triton.launch import Launcher


class Tile(NamedTuple):
    """How a launch divides its work.

    Attributes:
        block_n: outputs of a program.
        parts: products at a time, over consecutive blocks of columns; more than one is a warp each.
        splits: programs that share a tile of outputs.
        stages: loads in flight.
        warps: of a program.
    """

    block_n: int
    parts: int
    splits: int
    stages: int
    warps: int


@triton.jit
def _product(
    codes, block, x_at, scale, zero, has_row, rows, N,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Of PARTS blocks of columns, codes [PARTS, ROWS, BLOCK_K / 2]: the sum over each."""
    HALF: tl.constexpr = BLOCK_K // 2
    blocks = block + tl.arange(0, PARTS)
    if not EVEN:
        has_row = has_row & (blocks < K // BLOCK_K)[:, None, None]
        blocks = tl.minimum(blocks, K // BLOCK_K - 1)
    first = tl.load(x_at + block * BLOCK_K, has_row, other=0.0)
    second = tl.load(x_at + block * BLOCK_K + HALF, has_row, other=0.0)
    DTYPE: tl.constexpr = first.dtype
    at = (blocks * BLOCK_K // GROUP)[:, None] * N + rows[None, :]
    factor = tl.load(scale + at).to(tl.float32)[:, :, None]
    offset = offset_codes(tl.load(zero + at), DTYPE)[:, :, None]
    low, high = unpack(codes, DTYPE, NATIVE)
    low, high = (
        subtract(low, offset, DTYPE, NATIVE),
        subtract(high, offset, DTYPE, NATIVE),
    )
    if PARTS == 1:
        low, high = tl.reshape(low, low.shape[1:]), tl.reshape(high, high.shape[1:])
        first, second = (
            tl.reshape(first, first.shape[1:]),
            tl.reshape(second, second.shape[1:]),
        )
        factor = tl.reshape(factor, factor.shape[1:])
        product = tl.zeros([low.shape[0], BLOCK_M], tl.float32)
    else:
        product = tl.zeros([PARTS, low.shape[1], BLOCK_M], tl.float32)
    product = dot(low, first, product, NATIVE)
    return dot(high, second, product, NATIVE) * factor


@triton.jit(do_not_specialize=["M"])
def _int4_skinny(
    out,  # [M, N], or [M, N / 2] if gated; also the residual
    x,  # [M, K]
    packed,  # uint8 [N, K / 2]
    scale,  # [K / GROUP, N]
    zero,  # uint8 [K / GROUP, N]
    bias,  # [N]
    partial,  # float32 [tiles, SPLITS, rows, BLOCK_M]
    arrivals,  # int32 [tiles], zero before and after
    M,
    N,
    out_stride,
    x_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N if ACT is None else 2 * BLOCK_N
    HALF: tl.constexpr = BLOCK_K // 2
    BLOCKS: tl.constexpr = K // BLOCK_K
    STEPS: tl.constexpr = (BLOCKS + PARTS * SPLITS - 1) // (PARTS * SPLITS)
    EVEN: tl.constexpr = BLOCKS % (PARTS * SPLITS) == 0
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = weight_rows(tl.arange(0, ROWS), tile, N, BLOCK_N, ACT is not None)
    m = tl.arange(0, BLOCK_M)
    part = tl.arange(0, PARTS)
    half = tl.arange(0, HALF)
    p_at = packed + (rows * (K // 2))[None, :, None] + (part[:, None] * HALF + half)[:, None, :]
    k = part[:, None] * BLOCK_K + half[None, :]
    x_at = x + (m.to(tl.int64) * x_stride)[None, None, :] + k[:, :, None]
    has_row = (m < M)[None, None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    if PARTS == 1:
        acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([PARTS, ROWS, BLOCK_M], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        block = (split * STEPS + step) * PARTS
        if EVEN:
            codes = tl.load(p_at + block * HALF, eviction_policy="evict_first")
        else:
            codes = tl.load(p_at + block * HALF, (block + part < BLOCKS)[:, None, None], other=0)
        acc += _product(
            codes, block, x_at, scale, zero, has_row, rows, N,
            K, GROUP, BLOCK_K, BLOCK_M, PARTS, EVEN, PDL,
        )  # fmt: skip
    y = acc if PARTS == 1 else tl.sum(acc, axis=0)

    if SPLITS == 1:
        finish(y, out, bias, tile, M, N, out_stride, BLOCK_M, BLOCK_N, BIAS, RESIDUAL, ACT)
    else:
        cell = tl.arange(0, ROWS)[:, None] * BLOCK_M + m[None, :]
        parts_at = partial + tile.to(tl.int64) * (SPLITS * ROWS * BLOCK_M) + cell
        tl.store(parts_at + split * (ROWS * BLOCK_M), y)
        tl.debug_barrier()  # every thread's stores come before the arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([ROWS, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(parts_at + other * (ROWS * BLOCK_M), cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            finish(
                total,
                out,
                bias,
                tile,
                M,
                N,
                out_stride,
                BLOCK_M,
                BLOCK_N,
                BIAS,
                RESIDUAL,
                ACT,
            )


_launch = Launcher(_int4_skinny)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of the programs that share a tile: zero whenever no kernel runs."""
    return torch.zeros(8192, dtype=torch.int32, device=device)


def int4_skinny(
    tile: Tile,
    x: Tensor,
    weight: Int4Matrix,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``int4_linear`` of some rows, whose columns are in the order of the weight's."""
    size, columns = weight.packed.shape[0], x.shape[1]
    outputs = size if act is None else size // 2
    out = x.new_empty(len(x), outputs) if residual is None else residual
    block_m = max(8, triton.next_power_of_2(len(x)))
    tiles = triton.cdiv(outputs, tile.block_n)
    partial = arrivals = None
    if tile.splits > 1:
        cells = tiles * tile.splits * tile.block_n * (1 if act is None else 2) * block_m
        partial = x.new_empty(cells, dtype=torch.float32)
        arrivals = _arrivals(x.device)
    arrays = (weight.packed, weight.scale, weight.zero)
    _launch(
        (tiles, tile.splits, 1),
        (
            *(out, x, *arrays, bias, partial, arrivals),
            *(len(x), size, out.stride(0), x.stride(0)),
        ),
        (
            *(columns, weight.group, block_m, tile.block_n, weight.block),
            *(tile.parts, tile.splits, tile.stages),
            *(bias is not None, residual is not None, act),
        ),
        tile.warps,
    )
    return out


def choose_tile(rows: int, outputs: int) -> Tile:
    """A good division of the work."""
    if rows <= 16:
        return Tile(16, 4, 1, 4, 4)
    return Tile(64, 1, 1, 6, 4)
