"""Which experts each token goes through, and the rows of each expert, without the host.

``choose_experts`` has a program for each token; ``group_rows`` one for each expert. The latter all
read all choices, so that none of them waits for another and rows keep their order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import Routing


@triton.jit
def _choose_experts(
    weights,  # [tokens, TOP_K + SHARED]
    experts,  # int32 [tokens, TOP_K + SHARED]
    logits,  # [tokens, COUNT], or [tokens, COUNT + 1] with a gate
    bias,  # [COUNT]
    factors,  # [COUNT]
    FACTOR: tl.constexpr,
    SHARPNESS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    FACTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BLOCK``: of the experts of a group, with padding; there are ``BLOCK_GROUPS`` of them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    logits += token * (COUNT + GATE)
    EACH: tl.constexpr = COUNT // GROUPS
    i = tl.arange(0, BLOCK_GROUPS * BLOCK)
    e = i // BLOCK * EACH + i % BLOCK
    exists = (i % BLOCK < EACH) & (i // BLOCK < GROUPS)
    logit = tl.load(logits + e, exists, other=float("-inf")).to(tl.float32) * SHARPNESS
    rank = 1.0 / (1.0 + tl.exp(-logit)) if SIGMOID else logit
    if BIAS:
        rank += tl.load(bias + e, exists, other=0.0).to(tl.float32)
    if GROUPS > 1:
        rank = tl.where(exists, rank, float("-inf"))
        rank = _in_best_groups(rank, GROUPS, TOP_GROUPS, BLOCK_GROUPS, BLOCK, SIGMOID)
    # Whole numbers in the order of the ranks: for these, a warp has instructions that find the
    # greatest. None is as small as that of what does not exist, not even that of NaN.
    rank = tl.where(rank == 0.0, 0.0, rank)  # of -0.0, too
    bits = rank.to(tl.int32, bitcast=True)
    key = tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    j = tl.arange(0, BLOCK_K)
    chosen = COUNT + j - TOP_K
    for k in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key), e, COUNT))
        chosen = tl.where(j == k, best, chosen)
        key = tl.where(e == best, -(2**31), key)
    own = tl.load(logits + chosen, j < TOP_K, other=float("-inf")).to(tl.float32) * SHARPNESS
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-own))
    else:
        weight = tl.exp(own - tl.max(logit))
        if not NORMALIZE:
            weight /= tl.sum(tl.exp(logit - tl.max(logit)))
    if NORMALIZE:
        weight /= tl.sum(weight) + 1e-20
    weight *= FACTOR
    if FACTORS:
        weight *= tl.load(factors + chosen, j < TOP_K, other=0.0).to(tl.float32)
    if SHARED > 0:
        shared = 1.0
        if GATE:
            shared = 1.0 / (1.0 + tl.exp(-tl.load(logits + COUNT).to(tl.float32)))
        weight = tl.where(j < TOP_K, weight, shared)
    at = token * (TOP_K + SHARED) + j
    used = j < TOP_K + SHARED
    tl.store(experts + at, chosen, used)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), used)


@triton.jit
def _in_best_groups(
    rank,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
):
    """The ranks of experts, and minus infinity outside of the best groups."""
    ranks = tl.reshape(rank, [BLOCK_GROUPS, BLOCK])
    best = tl.max(ranks, axis=1)
    if SUM_OF_TWO:
        i = tl.arange(0, BLOCK)[None, :]
        first = tl.min(tl.where(ranks == best[:, None], i, BLOCK), axis=1)
        best += tl.max(tl.where(i == first[:, None], float("-inf"), ranks), axis=1)
    group = tl.arange(0, BLOCK_GROUPS)
    is_best = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        found = tl.min(tl.where(best == tl.max(best), group, GROUPS - 1))
        is_best |= group == found
        best = tl.where(group == found, float("-inf"), best)
    ranks = tl.where(is_best[:, None], ranks, float("-inf"))
    return tl.reshape(ranks, [BLOCK_GROUPS * BLOCK])


_launch_choice = Launcher(_choose_experts)


def choose_experts(
    logits: Tensor,
    routing: Routing,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels.experts.choose_experts``."""
    tokens, count = len(logits), logits.shape[1] - routing.has_gate
    weights = torch.empty(tokens, routing.used, dtype=dtype, device=logits.device)
    experts = torch.empty(tokens, routing.used, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, experts
    groups = routing.groups
    constants = (
        *(routing.factor, routing.sharpness, count, groups, routing.top_groups),
        *(next_power_of_2(groups), next_power_of_2(count // groups)),
        *(routing.top_k, routing.shared, next_power_of_2(routing.used)),
        *(routing.scores == "sigmoid", routing.normalize, routing.has_gate),
        *(bias is not None, factors is not None),
    )
    _launch_choice((tokens, 1, 1), (weights, experts, logits, bias, factors), constants, 1)
    return weights, experts


class Groups(NamedTuple):
    """The rows of each expert: those of all experts one after the other, in blocks of each.

    A row is a token that goes through an expert; there are tokens * top_k of them.

    Attributes:
        order: int32 [rows]; token * top_k + choice of each. None for one token, of which each row
            is a block of its own.
        blocks: int32 [most blocks, 3]; the expert, first row and end of each block, and experts of
            -1 past the last one. Without an order, the experts.
        block: the most rows of a block.
    """

    order: Tensor | None
    blocks: Tensor
    block: int


@triton.jit(do_not_specialize=["rows", "most"])
def _group_rows(
    order,
    blocks,
    experts,  # int32 [rows]
    rows,
    most,  # blocks
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    e = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, rows, CHUNK):
        exists = start + i < rows
        counts += tl.histogram(tl.load(experts + start + i, exists, other=0), BINS, exists)
    cut = (counts + (BLOCK_M - 1)) // BLOCK_M
    first = tl.sum(tl.where(e < own, counts, 0))
    block = tl.sum(tl.where(e < own, cut, 0))
    count = tl.sum(tl.where(e == own, counts, 0))
    at = first
    for start in range(0, rows, CHUNK):
        mine = tl.load(experts + start + i, start + i < rows, other=-1) == own
        ones = mine.to(tl.int32)
        tl.store(order + at + tl.cumsum(ones) - 1, start + i, mine)
        at += tl.sum(ones)
    for start in range(0, count, BLOCK_M * CHUNK):
        row = start + i * BLOCK_M
        cell = blocks + (block + row // BLOCK_M) * 3
        tl.store(cell, own, row < count)
        tl.store(cell + 1, first + row, row < count)
        tl.store(cell + 2, first + tl.minimum(row + BLOCK_M, count), row < count)
    if own == COUNT - 1:
        for start in range(tl.sum(cut), most, CHUNK):
            tl.store(blocks + (start + i) * 3, -1, start + i < most)


@triton.jit(do_not_specialize=["rows"])
def _count_rows(
    counts,  # int32 [parts, BINS]
    experts,  # int32 [rows]
    rows,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of each expert in a part."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    found = tl.histogram(tl.load(experts + row, row < rows, other=0), BINS, row < rows)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["parts"])
def _add_parts(
    counts,  # int32 [parts, BINS]; becomes the rows in the parts before
    totals,  # int32 [BINS]
    parts,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each expert."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before = 0
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        at = counts + part * BINS + tl.program_id(0)
        found = tl.load(at, part < parts, other=0)
        tl.store(at, before + tl.cumsum(found) - found, part < parts)
        before += tl.sum(found)
    tl.store(totals + tl.program_id(0), before)


@triton.jit(do_not_specialize=["rows", "most", "parts"])
def _place_rows(
    order,
    blocks,
    counts,  # [parts, BINS], and totals: as from ``_add_parts``
    totals,
    experts,  # int32 [rows]
    rows,
    most,  # blocks
    parts,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each part of the rows, and for each expert, whose blocks it writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.program_id(0)
    e = tl.arange(0, BINS)
    count = tl.load(totals + e)
    first = tl.cumsum(count) - count
    if own < parts:
        row = own * PART + tl.arange(0, PART)
        expert = tl.load(experts + row, row < rows, other=-1)
        is_own = (expert[:, None] == e[None, :]).to(tl.int32)
        start = first + tl.load(counts + own * BINS + e)
        place = tl.cumsum(is_own, axis=0) - 1 + start[None, :]
        tl.store(order + tl.sum(place * is_own, axis=1), row, row < rows)
    cut = (count + (BLOCK_M - 1)) // BLOCK_M
    i = tl.arange(0, PART)
    if own < BINS:
        begin = tl.sum(tl.where(e == own, first, 0))
        length = tl.sum(tl.where(e == own, count, 0))
        block = tl.sum(tl.where(e < own, cut, 0))
        for start in range(0, length, BLOCK_M * PART):
            at = start + i * BLOCK_M
            cell = blocks + (block + at // BLOCK_M) * 3
            tl.store(cell, own, at < length)
            tl.store(cell + 1, begin + at, at < length)
            tl.store(cell + 2, begin + tl.minimum(at + BLOCK_M, length), at < length)
    if own == 0:
        for start in range(tl.sum(cut), most, PART):
            tl.store(blocks + (start + i) * 3, -1, start + i < most)


_launch_groups = Launcher(_group_rows)
_launch_counts = Launcher(_count_rows)
_launch_sums = Launcher(_add_parts)
_launch_places = Launcher(_place_rows)
#: From so many rows on, programs count the rows of a part, and not all of them.
_MANY_ROWS = 4096
#: Rows of a part.
_PART = 128


def group_rows(experts: Tensor, count: int, block: int) -> Groups:
    """Group choices, int32 [tokens, top_k], of ``count`` experts."""
    rows = experts.numel()
    if len(experts) == 1:
        return Groups(None, experts.view(-1), block)
    most = most_blocks(rows, count, block)
    order = torch.empty(rows, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(most, 3, dtype=torch.int32, device=experts.device)
    if rows >= _MANY_ROWS:
        _group_parts(order, blocks, experts, next_power_of_2(count), block)
        return Groups(order, blocks, block)
    chunk = min(max(next_power_of_2(rows), 32), 1024)
    constants = count, next_power_of_2(count), block, chunk
    warps = max(1, min(chunk // 128, 8))
    _launch_groups((count, 1, 1), (order, blocks, experts, rows, most), constants, warps)
    return Groups(order, blocks, block)


def _group_parts(order: Tensor, blocks: Tensor, experts: Tensor, bins: int, block: int) -> None:
    """As ``_group_rows``, in three launches: their time does not grow with the square of rows."""
    rows, most = len(order), len(blocks)
    parts = cdiv(rows, _PART)
    counts = torch.empty(parts + 1, bins, dtype=torch.int32, device=experts.device)
    totals = counts[parts]
    _launch_counts((parts, 1, 1), (counts, experts, rows), (bins, _PART), 4)
    _launch_sums((bins, 1, 1), (counts, totals, parts), (bins, 512), 4)
    args = order, blocks, counts, totals, experts, rows, most, parts
    _launch_places((max(parts, bins), 1, 1), args, (bins, block, _PART), 4)


def most_blocks(rows: int, experts: int, block: int) -> int:
    """The most blocks that so many rows can make."""
    return cdiv(rows + min(rows, experts) * (block - 1), block) if rows > 0 else 0
