"""Mixtures of experts on a GPU: two to four launches after the router, or more in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.experts import mxfp4, mxfp4_few, mxfp4_one, products, prompts
from asyncllm.kernels.triton.experts.product import Product
from asyncllm.kernels.triton.experts.products import Tile
from asyncllm.kernels.triton.experts.routing import group_rows
from asyncllm.kernels.triton.experts.single import fits, mix_one
from asyncllm.kernels.triton.launch import Launcher, cdiv, shared_bytes
from asyncllm.kernels.types import (
    MXFP4_COLUMNS,
    ExpertWeight,
    Fp8Matrix,
    Gated,
    GatedExperts,
    Int4Matrix,
    Mxfp4Matrix,
)


@triton.jit(do_not_specialize=["elements", "logit_stride"])
def _add_up(
    out,  # [tokens, SIZE]
    parts,  # [tokens, TOP_K, SIZE]
    beside,  # [tokens, SIZE]
    logit,  # [tokens, 1]
    elements,
    logit_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BESIDE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < elements
    part = parts + at // SIZE * (SIZE * TOP_K) + at % SIZE
    total = tl.load(part, exists, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TOP_K):
        total += tl.load(part + j * SIZE, exists, other=0.0).to(tl.float32)
    if BESIDE:
        gate = tl.load(logit + at // SIZE * logit_stride, exists, other=0.0).to(tl.float32)
        value = tl.load(beside + at, exists, other=0.0).to(tl.float32)
        total += value / (1.0 + tl.exp(-gate))
    if RESIDUAL:
        total += tl.load(out + at, exists, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), exists)


_launch = Launcher(_add_up)


def mix_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    residual: Tensor | None = None,
    beside: Gated | None = None,
) -> Tensor:
    """See ``kernels.experts.mix_experts``."""
    tokens, top_k = chosen.shape
    out = torch.empty_like(x) if residual is None else residual
    if tokens == 1 and fits(experts, x, top_k):
        mix_one(out, x, weights, chosen, experts, beside, has_residual=residual is not None)
        return out
    # It is not for the interpreter.
    if tokens == 1 and beside is None and x.is_cuda and mxfp4_one.fits(experts, top_k):
        mxfp4_one.mix_one(out, x, weights, chosen, experts, has_residual=residual is not None)
        return out
    kernels = choose_kernels(tokens * top_k, experts, x)
    return _mix(out, x, weights, chosen, experts, residual is not None, beside, kernels)


def ordered_mix_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    residual: Tensor | None = None,
    beside: Gated | None = None,
) -> Tensor:
    """See ``kernels.experts.ordered_mix_experts``."""
    tokens, top_k = chosen.shape
    out = torch.empty_like(x) if residual is None else residual
    kernels = ordered_kernels(tokens * top_k, experts, x)
    return _mix(out, x, weights, chosen, experts, residual is not None, beside, kernels)


def _mix(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    has_residual: bool,
    beside: Gated | None,
    kernels: Kernels,
) -> Tensor:
    """Grouped by expert; one token has no groups."""
    tokens, top_k = chosen.shape
    if tokens == 0:
        return out
    rows = tokens * top_k
    groups = group_rows(chosen, experts.num_experts, kernels.block)
    inner = x.new_empty(rows, experts.inner_size)
    kernels.first(Product.first(inner, x, experts, groups, top_k))
    parts = x.new_empty(rows, x.shape[1])
    kernels.second(Product.second(parts, inner, experts, groups, weights))
    add_up(out, parts, top_k, beside, has_residual=has_residual)
    return out


def add_up(
    out: Tensor, parts: Tensor, top_k: int, beside: Gated | None, *, has_residual: bool
) -> None:
    """Add the parts of each token, in order, and ``beside``, to what ``out`` has or to nothing."""
    block = 512
    grid = (cdiv(out.numel(), block), 1, 1)
    values, logit = (None, None) if beside is None else beside
    stride = 0 if logit is None else logit.stride(0)
    constants = out.shape[1], top_k, block, beside is not None, has_residual
    _launch(grid, (out, parts, values, logit, out.numel(), stride), constants, 4)


class Kernels(NamedTuple):
    """How the products of so many rows are computed.

    Attributes:
        block: the most rows of a block.
        first, second: the two products.
    """

    block: int
    first: Callable[[Product], None]
    second: Callable[[Product], None]


def choose_kernels(rows: int, experts: GatedExperts, x: Tensor) -> Kernels:
    """The kernels for so many rows of all experts."""
    each = rows / experts.num_experts
    is_hopper = x.is_cuda and gpu_of(x.device).is_hopper
    if is_hopper and _are_paired_mxfp4(experts):
        if len(x) > 1 and each <= mxfp4_few.MOST_ROWS and mxfp4_few.fits(experts, x):
            return Kernels(mxfp4_few.BLOCK_M, mxfp4_few.multiply, mxfp4_few.multiply)
        if each >= mxfp4.LEAST_ROWS:
            block, tile = mxfp4.choose_tile(each)
            return Kernels(block, *[partial(mxfp4.multiply, tile=tile)] * 2)
    if is_hopper and each >= prompts.LEAST_ROWS and _fits_prompts(experts, x):
        return Kernels(prompts.BLOCK_M.value, prompts.multiply, prompts.multiply)
    block, *tiles = choose_tiles(rows, experts, x)
    return Kernels(block, *(partial(products.multiply, tile=tile) for tile in tiles))


def ordered_kernels(rows: int, experts: GatedExperts, x: Tensor) -> Kernels:
    """Those that add up in one order, for so many rows.

    Tiles multiply the columns in the same order, whatever their size, but for MXFP4: the size of a
    step decides there, of which there is one. In 8 bits, blocks of 8 rows would take instructions
    that add up otherwise.
    """
    block, *tiles = choose_tiles(rows, experts, x)
    if isinstance(experts.gate_up, Fp8Matrix):
        block = max(block, 16)
    elif isinstance(experts.gate_up, Mxfp4Matrix):
        tiles = [_fitting(Tile(64, MXFP4_COLUMNS, 2, 3), block, experts.gate_up, x)] * 2
    return Kernels(block, *(partial(products.multiply, tile=tile) for tile in tiles))


def _are_paired_mxfp4(experts: GatedExperts) -> bool:
    weights = experts.gate_up, experts.down
    return experts.paired and all(isinstance(weight, Mxfp4Matrix) for weight in weights)


def _fits_prompts(experts: GatedExperts, x: Tensor) -> bool:
    """Whether ``prompts.multiply`` can take both products."""
    weights = experts.gate_up, experts.down
    if experts.paired or experts.gate_up_bias is not None:
        return False
    if all(isinstance(weight, Fp8Matrix) and weight.is_blocked for weight in weights):
        return experts.inner_size % 128 == x.shape[1] % 128 == 0
    is_dense = all(isinstance(weight, Tensor) for weight in weights) and x.itemsize == 2
    return is_dense and experts.inner_size % 64 == x.shape[1] % 64 == 0


def choose_tiles(rows: int, experts: GatedExperts, x: Tensor) -> tuple[int, Tile, Tile]:
    """The rows of a block, and the tiles of the two products, for so many rows of all experts.

    The best of some dozen that were measured on an H200 with the shapes of Qwen3-30B-A3B and
    gpt-oss-20b.
    """
    each = rows / experts.num_experts
    weight = experts.gate_up
    if isinstance(weight, Int4Matrix):
        block = 16 if each <= 12 else 32 if each <= 48 else 64
        first = second = Tile(64, weight.block, 4, 4)
    elif isinstance(weight, Mxfp4Matrix):
        # Not four warps with more than 8 rows: Triton then takes wgmma, for whose first operand
        # ``mxfp4_numbers`` would get bytes of two rows at a time.
        block = 8 if each <= 5 else 16 if each <= 12 else 32
        if each <= 0.25:
            first, second = Tile(32, 512, 2, 3), Tile(16, 256, 1, 5)
        elif each <= 5:
            first = second = Tile(64, 256, 4, 3)
        elif each <= 12:
            first, second = Tile(64, 256, 2, 3), Tile(32, 256, 2, 3)
        else:
            first = second = Tile(64, 128, 2, 3)
    elif isinstance(weight, Fp8Matrix):
        block = 8 if each <= 2 else 16 if each <= 12 else 32 if each <= 24 else 64
        block = block if each <= 96 else 128
        first = second = Tile(128, 128, 4, 3) if block == 64 else Tile(64, 128, 4, 4)
    elif x.dtype == torch.float32:
        block, first, second = 16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    elif each <= 12:
        block, first, second = 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)
    elif each <= 24:
        block, first, second = 32, Tile(64, 128, 4, 3), Tile(128, 64, 4, 4)
    elif each <= 96:
        block, first, second = 64, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)
    else:
        block = 128 if each <= 192 else 256
        first, second = Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)
    return block, _fitting(first, block, weight, x), _fitting(second, block, weight, x)


def _fitting(tile: Tile, block: int, weight: ExpertWeight, x: Tensor) -> Tile:
    """The tile with as many stages as the GPU has shared memory for."""
    is_packed = isinstance(weight, Int4Matrix | Mxfp4Matrix)
    row = tile.columns * (1 if isinstance(weight, Fp8Matrix) else x.itemsize)
    stage = tile.rows * (tile.columns // 2 if is_packed else row) + block * row
    return tile._replace(stages=max(min(tile.stages, shared_bytes(x) // stage), 1))
