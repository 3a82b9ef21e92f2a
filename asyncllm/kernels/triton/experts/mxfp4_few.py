"""Products of few rows with experts in MXFP4, on tensor cores fed from registers.

A program has a block of up to eight rows of x, which it copies to shared memory once, and 128 rows
of the weight of their expert. A thread loads those words of the weight that it converts itself,
four blocks of 128 columns ahead; nothing is passed between warps.

On an H200, 2 tokens of gpt-oss-20b take 41 us a layer, 8 take 97, 32 take 137, where ``products``
takes 53, 100 and 148 (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.codes import mxfp4_operand, mxfp4_words
from asyncllm.kernels.triton.experts.mxfp4 import Operands, weight_rows, write_outputs
from asyncllm.kernels.triton.experts.product import Product
from asyncllm.kernels.triton.launch import Launcher, cdiv, shared_bytes
from asyncllm.kernels.types import GatedExperts, Mxfp4Matrix

#: Rows of x of a block. With 16, a product takes half as long again.
BLOCK_M = 8
#: Up to so many rows of an expert, this kernel takes less time than others.
MOST_ROWS = 4
#: Warps of a program, with 16 rows of the weight each.
WARPS = gl.constexpr(8)
#: Columns of a block, and blocks that are requested ahead.
SPAN, AHEAD = gl.constexpr(128), gl.constexpr(4)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


class Plan(NamedTuple):
    """Constants of a launch; see ``prompts.Plan``."""

    outputs: Any
    columns: Any
    top_k: Any
    block_m: Any
    act: Any
    alpha: Any
    limit: Any
    bias: Any


@gluon.jit
def _request(ops, row, block, plan: gl.constexpr):
    """The words and scales of a block of rows."""
    LAYOUT: gl.constexpr = row.type.layout.parent
    BLOCKS: gl.constexpr = (plan.columns + SPAN - 1) // SPAN
    k = gl.arange(0, SPAN // 8, layout=gl.SliceLayout(0, LAYOUT))
    inside = (row >= 0) & (block < BLOCKS)
    at = row * BLOCKS + block
    words_at = ops.weight + at.to(gl.int64)[:, None] * (SPAN // 8) + k[None, :]
    exists = inside[:, None] & (k >= 0)[None, :]
    words = gl.load(words_at, exists, other=0, eviction_policy="evict_first")
    return words, gl.load(ops.scale + at, inside, other=0)


@gluon.jit
def _share(shared, ops, first, end, plan: gl.constexpr):
    """Rows of x in shared memory; past the end, the last row again. Columns past the last are 0."""
    STEPS: gl.constexpr = shared.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    m = gl.arange(0, plan.block_m, layout=gl.SliceLayout(1, LAYOUT))
    m = gl.minimum(first + m, end - 1)
    source = m if plan.act is None else gl.load(ops.order + m) // plan.top_k
    column = gl.arange(0, AHEAD * SPAN, layout=gl.SliceLayout(0, LAYOUT))
    at = ops.x + source.to(gl.int64)[:, None] * ops.x_stride + column[None, :]
    for step in gl.static_range(STEPS):
        inside = (step * (AHEAD * SPAN) + column < plan.columns)[None, :] & (m >= 0)[:, None]
        to = shared.index(step)
        async_copy.async_copy_global_to_shared(to, at + step * (AHEAD * SPAN), inside)
    async_copy.commit_group()
    async_copy.wait_group(0)
    debug_barrier()


@gluon.jit(do_not_specialize=["tiles"])
def _multiply_few(
    out,
    x,
    weight,  # int32 [experts * outputs, padded columns / 8]
    scale,  # int32 [experts * outputs, padded columns / 128]
    bias,
    factors,
    order,
    blocks,
    tiles,
    x_stride,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ACT: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    plan: gl.constexpr = Plan(OUTPUTS, COLUMNS, TOP_K, BLOCK_M, ACT, ALPHA, LIMIT, BIAS)
    ROWS: gl.constexpr = 16 * WARPS
    STEPS: gl.constexpr = (COLUMNS + AHEAD * SPAN - 1) // (AHEAD * SPAN)
    WORDS: gl.constexpr = mxfp4_words(WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    shared = gl.allocate_shared_memory(x.dtype.element_ty, [STEPS, BLOCK_M, AHEAD * SPAN], SHARED)
    ops = Operands(x, weight, scale, bias, factors, order, blocks, tiles, 0, x_stride)
    block = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(blocks + block * 3)
    if expert >= 0:
        first = gl.load(blocks + block * 3 + 1)
        end = gl.load(blocks + block * 3 + 2)
        i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WORDS))
        row = gl.minimum(tile * ROWS + weight_rows(i, plan), OUTPUTS - 1) + expert * OUTPUTS
        ahead: gl.tuple = ()
        for b in gl.static_range(AHEAD):
            ahead += (_request(ops, row, b, plan),)
        _share(shared, ops, first, end, plan)
        sums = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SUMS)
        for step in range(STEPS):
            later: gl.tuple = ()
            for b in gl.static_range(AHEAD):
                words, scales = ahead[b]
                # No number changes its thread.
                w = gl.convert_layout(mxfp4_operand(words, scales), gl.DotOperandLayout(0, SUMS, 2))
                later += (_request(ops, row, (step + 1) * AHEAD + b, plan),)
                here = shared.index(step).slice(b * SPAN, SPAN, dim=1).permute((1, 0))
                sums = mma_v2(w, here.load(gl.DotOperandLayout(1, SUMS, 2)), sums)
            ahead = later
        EACH: gl.constexpr = 8 if ACT is None else 4
        layout: gl.constexpr = gl.BlockedLayout([EACH, 1], [16, 2], [1, WARPS], [0, 1])
        write_outputs(out, sums, ops, expert, tile, first, end, layout, plan)


_launch = Launcher(_multiply_few, max_registers=128)


def fits(experts: GatedExperts, x: Tensor) -> bool:
    """Whether a block of rows of x, and of inner features, has room in shared memory."""
    step: int = AHEAD.value * SPAN.value
    steps = cdiv(max(experts.inner_size, x.shape[1]), step)
    return steps * step * BLOCK_M * x.itemsize <= shared_bytes(x)


def multiply(p: Product) -> None:
    """See ``products.multiply``; gate and up are paired."""
    assert isinstance(p.weight, Mxfp4Matrix)
    act, _, alpha, limit = p.act
    words, scale = (part.view(torch.int32) for part in p.weight)
    order, blocks, block = p.groups
    tiles = cdiv(p.size, 16 * WARPS.value)
    _launch(
        (len(blocks) * tiles, 1, 1),
        (p.out, p.x, words, scale, p.bias, p.factors, order, blocks, tiles, p.x.stride(0)),
        (p.size, p.x.shape[1], p.top_k, block, act, alpha, limit, p.bias is not None),
        WARPS.value,
    )
