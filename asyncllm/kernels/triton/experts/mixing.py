"""Mixtures of experts on a GPU: three or four launches after the router."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.experts.products import Tile, multiply
from asyncllm.kernels.triton.experts.routing import group_rows
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import GatedExperts


@triton.jit(do_not_specialize=["elements"])
def _add_up(
    out,  # [tokens, SIZE]
    parts,  # [tokens, TOP_K, SIZE]
    elements,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
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
) -> Tensor:
    """See ``kernels.experts.mix_experts``."""
    tokens, top_k = chosen.shape
    out = torch.empty_like(x) if residual is None else residual
    if tokens == 0:
        return out
    count, size, hidden = experts.gate_up.shape
    block, first, second = choose_tiles(tokens * top_k, count, x.dtype)
    groups = group_rows(chosen, count, block)
    inner = x.new_empty(tokens * top_k, size // 2)
    multiply(
        *(inner, x, experts.gate_up, experts.gate_up_bias, weights, groups, first),
        top_k=top_k,
        act=experts.act,
        paired=experts.paired,
        alpha=experts.alpha,
        limit=experts.limit,
    )
    parts = x.new_empty(tokens * top_k, hidden)
    multiply(
        *(parts, inner, experts.down, experts.down_bias, weights, groups, second),
        top_k=top_k,
        act=None,
    )
    add_up(out, parts, top_k, has_residual=residual is not None)
    return out


def add_up(out: Tensor, parts: Tensor, top_k: int, *, has_residual: bool) -> None:
    """Add the parts of each token, in order, to what ``out`` has or to nothing."""
    block = 512
    grid = (cdiv(out.numel(), block), 1, 1)
    constants = out.shape[1], top_k, block, has_residual
    _launch(grid, (out, parts, out.numel()), constants, 4)


def choose_tiles(rows: int, experts: int, dtype: torch.dtype) -> tuple[int, Tile, Tile]:
    """The rows of a block, and the tiles of the two products, for so many rows of all experts."""
    if dtype == torch.float32:
        return 16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    each = rows / experts
    if each <= 12:
        return 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)
    if each <= 24:
        return 32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)
    if each <= 48:
        return 64, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)
    return 128, Tile(128, 64, 8, 4), Tile(128, 64, 8, 4)
