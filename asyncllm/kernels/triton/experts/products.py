"""Products of rows with the matrices of their experts, in Triton, on every GPU.

A program computes some outputs of one block of rows. The weight is the first operand, as in
``gemm.wgmma_tiles``: few rows then cost little, and the gate and up of an output meet in one
program. Rows of x are gathered as they are loaded.

Weights in 4 bits are converted to the dtype of x, exactly, on their way to the tensor cores. With
weights in 8 bits, x is rounded to 8 bits, too. Either is done however many rows there are.

On an H200, 8 to 256 tokens take as long as reading the chosen experts (docs/kernels.md). Prompts
have other kernels there.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.codes import (
    mxfp4_columns,
    mxfp4_factors,
    mxfp4_numbers,
    offset_codes,
    scaled,
    subtract,
    unpack,
)
from asyncllm.kernels.triton.experts.product import Product, parts
from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
from asyncllm.kernels.triton.launch import NATIVE, Launcher, cdiv
from asyncllm.kernels.types import Fp8Matrix


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b; float32 is not rounded."""
    if NATIVE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _load_step(w_at, x_at, has_row, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_K columns of the weight and of x, from ``start`` on."""
    if K % BLOCK_K == 0:
        return tl.load(w_at + start), tl.load(x_at + start, has_row, other=0.0)
    else:
        exists = start + tl.arange(0, BLOCK_K) < K
        w = tl.load(w_at + start, exists[None, :], other=0.0)
        return w, tl.load(x_at + start, exists[:, None] & has_row, other=0.0)


@triton.jit
def dense_sums(
    weight, x_at, has_row, rows, acc, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    k = tl.arange(0, BLOCK_K)
    w_at = weight + rows[:, None] * K + k[None, :]
    x_at += k[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w, x = _load_step(w_at, x_at, has_row, start, K, BLOCK_K)
        acc = _dot(w, x, acc)
    return acc


@triton.jit
def fp8_sums(
    weight, scale, x_at, x_scale, source, has_row, rows, acc, x_rows,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """With scales of blocks, steps are of 128 columns.

    Args:
        x_scale: for each row of x, which is in 8 bits, too, or for each row of each block.
        source: rows of x, of which there are ``x_rows``.
    """
    BLOCKS: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, BLOCK_K)
    w_at = weight + rows[:, None] * K + k[None, :]
    s_at = scale + rows // 128 * BLOCKS
    x_at += k[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w, x = _load_step(w_at, x_at, has_row, start, K, BLOCK_K)
        if BLOCKED:
            factor = tl.load(s_at + start // 128)[:, None]
            size = tl.load(x_scale + start // 128 * x_rows + source)
            acc += _dot(w, x, tl.zeros_like(acc)) * factor * size[None, :]
        else:
            acc = _dot(w, x, acc)
    if not BLOCKED:
        acc *= tl.load(scale + rows)[:, None] * tl.load(x_scale + source)[None, :]
    return acc


@triton.jit
def mxfp4_sums(
    packed, scale, x_at, has_row, rows, acc,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Steps are of whole blocks of 128 columns; x has fewer."""
    PADDED: tl.constexpr = (K + 127) // 128 * 128
    half = tl.arange(0, BLOCK_K // 2)
    w_at = packed + rows[:, None] * (PADDED // 2) + half[None, :]
    s_at = scale + rows[:, None] * (PADDED // 32) + tl.arange(0, BLOCK_K // 32)[None, :]
    k = mxfp4_columns(BLOCK_K)
    x_at += k[:, None]
    for start in tl.range(0, PADDED, BLOCK_K, num_stages=STAGES):
        if PADDED % BLOCK_K == 0:
            codes = tl.load(w_at + start // 2)
            scales = tl.load(s_at + start // 32)
        else:
            codes = tl.load(w_at + start // 2, (start // 2 + half < PADDED // 2)[None, :], other=0)
            group = start // 32 + tl.arange(0, BLOCK_K // 32)
            scales = tl.load(s_at + start // 32, (group < PADDED // 32)[None, :], other=0)
        first = tl.load(x_at + start, (start + k < K)[:, None] & has_row, other=0.0)
        second = tl.load(x_at + start + 16, (start + k + 16 < K)[:, None] & has_row, other=0.0)
        low, high = mxfp4_numbers(codes)
        factors = mxfp4_factors(scales)
        acc = _dot(scaled(low, factors), first, acc)
        acc = _dot(scaled(high, factors), second, acc)
    return acc


@triton.jit
def int4_sums(
    packed, scale, zero, x_at, has_row, rows, acc, count,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Steps are of a block of columns.

    Args:
        count: rows of the matrices of all experts.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    half = tl.arange(0, HALF)
    w_at = packed + rows[:, None] * (K // 2) + half[None, :]
    x_at += half[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        codes = tl.load(w_at + start // 2)
        first = tl.load(x_at + start, has_row, other=0.0)
        second = tl.load(x_at + start + HALF, has_row, other=0.0)
        at = start // GROUP * count + rows
        factor = tl.load(scale + at).to(tl.float32)[:, None]
        offset = offset_codes(tl.load(zero + at), first.dtype)[:, None]
        low, high = unpack(codes, first.dtype)
        low, high = subtract(low, offset, first.dtype), subtract(high, offset, first.dtype)
        acc += _dot(high, second, _dot(low, first, tl.zeros_like(acc))) * factor
    return acc


class Tile(NamedTuple):
    """How a program computes.

    Attributes:
        rows: of the weight.
        columns: of a step.
        warps, stages: of the program, and of its pipeline.
    """

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def activated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The inner features of experts, of float32 tiles."""
    if ACT == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        return activate(gate, ACT) * up


@triton.jit(do_not_specialize=["tiles", "count", "x_rows"])
def _multiply(
    out,  # [rows, N] or, if gated, [rows, N / 2]
    x,  # [tokens, K], or [rows, K] in the order of the groups
    weight,  # [experts, N, K]; codes, if it is quantised
    scale,
    zero,
    x_scale,  # if the weight has 8 bits: [rows], or [K / 128, rows]
    bias,  # [experts, N]
    factors,  # [tokens * TOP_K]
    order,
    blocks,
    tiles,
    count,  # experts * N
    x_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    PAIRED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """With ``ACT``, the first product: rows of x are tokens, outputs are in the order of the
    groups. Otherwise the second: the other way round, times the tokens' factors.

    If rows are not ``GROUPED``, each is a block of its own, and ``blocks`` has its expert.
    """
    GATED: tl.constexpr = ACT is not None
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    BLOCK_N: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles
    if GROUPED:
        expert = tl.load(blocks + block * 3)
        first = tl.load(blocks + block * 3 + 1)
        end = tl.load(blocks + block * 3 + 2)
    else:
        expert = tl.load(blocks + block)
        first = block
        end = block + 1
    if expert >= 0:
        row = first + tl.arange(0, BLOCK_M)
        exists = row < end
        choice = tl.load(order + row, exists, other=0) if GROUPED else row
        i = tl.arange(0, ROWS)
        n = tl.minimum(tile * BLOCK_N + i % BLOCK_N, OUTPUTS - 1)
        if GATED:
            n = n * 2 + i // BLOCK_N if PAIRED else n + i // BLOCK_N * OUTPUTS
        rows = expert.to(tl.int64) * N + n
        source = choice // TOP_K if GATED else row
        x_at = x + (source.to(tl.int64) * x_stride)[None, :]
        has_row = exists[None, :]
        acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
        if FORMAT == "int4":
            acc = int4_sums(
                weight, scale, zero, x_at, has_row, rows, acc, count, K, BLOCK_K, STAGES, GROUP
            )
        elif FORMAT == "mxfp4":
            acc = mxfp4_sums(weight, scale, x_at, has_row, rows, acc, K, BLOCK_K, STAGES)
        elif FORMAT == "dense":
            acc = dense_sums(weight, x_at, has_row, rows, acc, K, BLOCK_K, STAGES)
        else:
            acc = fp8_sums(
                weight, scale, x_at, x_scale, source, has_row, rows, acc, x_rows,
                K, BLOCK_K, STAGES, FORMAT == "fp8_blocks",
            )  # fmt: skip
        if BIAS:
            acc += tl.load(bias + rows).to(tl.float32)[:, None]
        if not GATED:
            acc *= tl.load(factors + choice, exists, other=0.0).to(tl.float32)[None, :]
        _write(out, acc, tile, row if GATED else choice, exists, OUTPUTS, ACT, ALPHA, LIMIT)


@triton.jit
def _write(
    out, acc, tile, place, exists,
    OUTPUTS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile's sums; ``place``: the rows of ``out`` that get them."""
    if ACT is not None:
        halves = tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1]])
        gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
        acc = activated(gate, up, ACT, ALPHA, LIMIT)
    output = tile * acc.shape[0] + tl.arange(0, acc.shape[0])[:, None]
    at = out + place.to(tl.int64)[None, :] * OUTPUTS + output
    tl.store(at, acc.to(out.dtype.element_ty), (output < OUTPUTS) & exists[None, :])


_launch = Launcher(_multiply)


def multiply(p: Product, tile: Tile) -> None:
    """Launch the kernel."""
    codes, scale, zero, form, group = parts(p.weight)
    x, x_scale = p.x, None
    if isinstance(p.weight, Fp8Matrix):
        x, x_scale = quantize_rows(x, blocked=form == "fp8_blocks")
    tiles = cdiv(p.size, tile.rows)
    count = codes.numel() // codes.shape[-1]
    order, blocks, block = p.groups
    _launch(
        (len(blocks) * tiles, 1, 1),
        (
            *(p.out, x, codes, scale, zero, x_scale, p.bias, p.factors, order, blocks),
            *(tiles, count, len(x), x.stride(0)),
        ),
        (
            *(p.size, x.shape[1], p.top_k, order is not None, block),
            *(tile.rows, tile.columns, tile.stages),
            *(form, group, *p.act, p.bias is not None),
        ),
        tile.warps,
    )
