"""Sampling in two or three kernels, which read the logits once.

1. Tiles: a program for each row and tile of the vocabulary stores the best score, the first token
   that has it, and the sum of weights exp((score - tile's best) / temperature). For rows with
   filters also the best score of each block, a small part of the tile.
2. Rows: a program for each row combines the tiles. A greedy row is done. For a draw without filters
   one random number picks a tile by the sums, then a token of that tile, which is read again.
3. Filters: a program for each row handles top-k, top-p and min-p; see ``topk_topp``.

The order of all sums depends on the row alone, and every row of a kind runs the same code, so that
the token of a row does not depend on the other rows.

On an H200, a draw among 151,936 tokens takes 4.9 us for one row and 31 for 256 (docs/kernels.md);
reading the logits takes 18 us for 256. Tiles of 4096 tokens draw for 256 rows in 28 us, but for one
in 5.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.triton.sampling.drawing import (
    LOG2_E,
    NONE,
    filtered,
    find,
    finish,
    is_finite,
    locate,
    parameters,
    uniform_of,
)
from asyncllm.kernels.triton.sampling.topk_topp import filter_kernel

_TILE = 2048  # tokens
_BLOCK = 32  # tokens
_CHUNK = 64  # blocks whose weights stay in registers while they are searched
_WIDE = 128  # blocks in each step of a pass over more than that
_TILE_WARPS = 4
_ROW_WARPS = 1
_FILTER_WARPS = 8


def sample_tokens(
    logits: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    draws: bool,
    filters: bool,
    relay: Tensor | None = None,
) -> Tensor:
    """See ``kernels.sampling.sample_tokens``; can be captured in a CUDA graph."""
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the logits of a row must be contiguous")
    num_tiles = cdiv(vocab, _TILE)
    num_blocks = num_tiles * (_TILE // _BLOCK)
    device = logits.device
    best = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    first = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    mass = torch.empty_like(best) if draws else best
    blocks = logits.new_empty(num_rows, num_blocks) if draws else logits
    source = (logits, logits.stride(0), vocab, table, slots)
    tiles = (best, first, mass)
    _launch_tiles(
        (num_tiles, num_rows, 1), (*source, *tiles, blocks), (draws, _TILE, _BLOCK), _TILE_WARPS
    )
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if relay is None:  # always one, so that fewer variants are compiled; nobody reads this one
        relay = torch.empty(len(table), dtype=torch.int64, device=device)
    args = (*source, positions, tokens, relay, *tiles, num_tiles)
    all_tiles = next_power_of_2(num_tiles)
    grid = (num_rows, 1, 1)
    _launch_rows(grid, args, (draws, _TILE, all_tiles), _ROW_WARPS)
    if filters:
        listed = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
        found = torch.empty(num_rows, _CHUNK * _BLOCK, dtype=torch.float32, device=device)
        steps = next_power_of_2(cdiv(num_blocks, _WIDE))
        constants = (next_power_of_2(num_blocks), _BLOCK, _CHUNK, _WIDE, steps, all_tiles)
        _launch_filters(grid, (*args, blocks, num_blocks, listed, found), constants, _FILTER_WARPS)
    return tokens


# Slices of an upload have any alignment.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _tile_kernel(
    logits,
    stride,
    vocab,
    table,
    slots,
    tile_best,
    tile_first,
    tile_mass,
    block_best,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ids = tile * TILE + tl.arange(0, TILE)
    scores = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scores = scores.to(tl.float32)
    at = row * tl.num_programs(0) + tile
    greedy = True
    if DRAWS:
        temperature, top_p, min_p, top_k = parameters(table, tl.load(slots + row).to(tl.int64))
        greedy = temperature == 0
        if temperature > 0:
            best = tl.max(scores, 0)
            base = tl.where(best == -float("inf"), 0.0, best)
            mass = tl.sum(tl.exp2((scores - base) * (LOG2_E / temperature)), 0)
            tl.store(tile_mass + at, mass)
            # With a NaN, or several infinities, no token can be chosen: as with infinity.
            tl.store(tile_best + at, tl.where(mass != mass, float("inf"), best))
            if filtered(top_p, min_p, top_k):
                heights = tl.max(tl.reshape(scores, [TILE // BLOCK, BLOCK]), 1)
                block = at * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
                tl.store(block_best + block, heights.to(block_best.dtype.element_ty))
    if greedy:
        # NaN counts as infinity.
        scores = tl.where(scores != scores, float("inf"), scores)
        best = tl.max(scores, 0)
        tl.store(tile_best + at, best)
        tl.store(tile_first + at, tl.min(tl.where(scores == best, ids, NONE), 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _row_kernel(
    logits,
    stride,
    vocab,
    table,
    slots,
    positions,
    tokens,
    relay,
    tile_best,
    tile_first,
    tile_mass,
    num_tiles,
    DRAWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Safe before the wait: the first kernel let this one start after its own wait for these.
    slot = tl.load(slots + row).to(tl.int64)
    temperature, top_p, min_p, top_k = parameters(table, slot)
    share = uniform_of(table, slot, tl.load(positions + row))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.arange(0, TILES)
    here = tile < num_tiles
    at = row * num_tiles + tile
    bests = tl.load(tile_best + at, mask=here, other=-float("inf"))
    firsts = tl.load(tile_first + at, mask=here, other=NONE)
    masses = tl.load(tile_mass + at, mask=here, other=0.0)
    best = tl.max(bests, 0)
    greedy = True
    if DRAWS:
        greedy = temperature == 0
        if temperature > 0:
            if is_finite(best):
                if not filtered(top_p, min_p, top_k):
                    scale = LOG2_E / temperature
                    weighted = (masses * tl.exp2((bests - best) * scale)).to(tl.float64)
                    chosen, share = find(weighted, share, TILES)
                    # Relative to the tile's own best, so that not all weights can underflow.
                    base = tl.max(tl.where(tile == chosen, bests, -float("inf")), 0)
                    weights = _tile_weights(
                        logits + row * stride, chosen, vocab, base, scale, TILE // 32, 32
                    )
                    token = chosen * TILE + locate(weights, share, TILE // 32, 32)
                    finish(token, best, slot, row, tokens, relay)
            else:
                finish(0, best, slot, row, tokens, relay)
    if greedy:
        token = tl.min(tl.where(bests == best, firsts, NONE), 0)
        finish(token, best, slot, row, tokens, relay)


@triton.jit
def _tile_weights(scores, tile, vocab, base, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    ids = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    ids += tile * ROWS * COLUMNS
    found = tl.load(scores + ids, mask=ids < vocab, other=-float("inf"))
    return tl.exp2((found.to(tl.float32) - base) * scale)


_launch_tiles = Launcher(_tile_kernel)
_launch_rows = Launcher(_row_kernel)
# It branches on sums: see ``Launcher``.
_launch_filters = Launcher(filter_kernel, fuses=False)
