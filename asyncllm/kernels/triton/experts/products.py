"""Products of rows with the matrices of their experts, in Triton, on every GPU.

A program computes BLOCK_N outputs of one block of rows. The weight is the first operand, as in
``gemm.wgmma_tiles``: few rows then cost little, and the gate and up of an output meet in one
program. Rows of x are gathered as they are loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.experts.routing import Groups
from asyncllm.kernels.triton.launch import NATIVE, Launcher, cdiv


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
def _dot(a, b, acc):
    if NATIVE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _activated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The inner features of experts, of float32 tiles."""
    if ACT == "clamped":
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        return activate(gate, ACT) * up


@triton.jit(do_not_specialize=["tiles"])
def _multiply(
    out,  # [rows, N] or, if gated, [rows, N / 2]
    x,  # [tokens, K], or [rows, K] in the order of the groups
    weight,  # [experts, N, K]
    bias,  # [experts, N]
    factors,  # [tokens * TOP_K]
    order,
    blocks,
    tiles,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    PAIRED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """With ``ACT``, the first product: rows of x are tokens, outputs are in the order of the
    groups. Otherwise the second: the other way round, times the tokens' factors."""
    GATED: tl.constexpr = ACT is not None
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    BLOCK_N: tl.constexpr = ROWS // 2 if GATED else ROWS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    cell = blocks + tl.program_id(0) // tiles * 3
    expert = tl.load(cell)
    if expert >= 0:
        row = tl.load(cell + 1) + tl.arange(0, BLOCK_M)
        exists = row < tl.load(cell + 2)
        choice = tl.load(order + row, exists, other=0)
        i = tl.arange(0, ROWS)
        n = tl.minimum(tile * BLOCK_N + i % BLOCK_N, OUTPUTS - 1)
        if GATED:
            n = n * 2 + i // BLOCK_N if PAIRED else n + i // BLOCK_N * OUTPUTS
        k = tl.arange(0, BLOCK_K)
        w_at = weight + expert.to(tl.int64) * (N * K) + n[:, None] * K + k[None, :]
        source = choice // TOP_K if GATED else row
        x_at = x + (source.to(tl.int64) * x_stride)[None, :] + k[:, None]
        acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                w = tl.load(w_at + start)
                here = tl.load(x_at + start, exists[None, :], other=0.0)
            else:
                w = tl.load(w_at + start, (start + k < K)[None, :], other=0.0)
                here = tl.load(x_at + start, (start + k < K)[:, None] & exists[None, :], other=0.0)
            acc = _dot(w, here, acc)
        if BIAS:
            acc += tl.load(bias + expert * N + n).to(tl.float32)[:, None]
        if GATED:
            halves = tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), [1, 2, 0])
            gate, up = tl.split(halves)
            acc = _activated(gate, up, ACT, ALPHA, LIMIT)
        else:
            acc *= tl.load(factors + choice, exists, other=0.0).to(tl.float32)[None, :]
        output = tile * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        place = (row if GATED else choice).to(tl.int64)[None, :]
        tl.store(
            out + place * OUTPUTS + output,
            acc.to(out.dtype.element_ty),
            (output < OUTPUTS) & exists[None, :],
        )


_launch = Launcher(_multiply)


def multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Tensor,
    groups: Groups,
    tile: Tile,
    *,
    top_k: int,
    act: str | None,
    paired: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    """Launch the kernel."""
    _, size, columns = weight.shape
    outputs, per_tile = (size // 2, tile.rows // 2) if act else (size, tile.rows)
    tiles = cdiv(outputs, per_tile)
    _launch(
        (len(groups.blocks) * tiles, 1, 1),
        (out, x, weight, bias, factors, groups.order, groups.blocks, tiles, x.stride(0)),
        (
            *(size, columns, top_k, groups.block, tile.rows, tile.columns, tile.stages),
            *(act, paired, alpha, limit, bias is not None),
        ),
        tile.warps,
    )
