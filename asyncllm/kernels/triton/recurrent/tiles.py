"""Cuts the rows of a step into tiles of tokens, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.types.recurrent import StateRows

#: Tokens of a tile.
TILE = 64


def find_tiles(rows: StateRows, num_tokens: int, least: int = 1) -> tuple[Tensor, int]:
    """Cut rows of at least ``least`` tokens into tiles of up to TILE tokens of one row; once, for
    all layers of a step.

    Returns:
        int32 [n, 2]: the row and the first token of each tile, and -1 after the last one; n depends
        on shapes alone.
    """
    bound = num_tokens // TILE + min(len(rows.slots), max(num_tokens // least, 1))
    if rows.one_token and least == 1:
        bound = num_tokens
        if least not in rows.found:
            row = torch.arange(bound, dtype=torch.int32, device=rows.offsets.device)
            rows.found[least] = torch.stack((row, row), dim=1)
    elif least not in rows.found:
        offsets = rows.offsets
        lengths = offsets.diff()
        counts = torch.where(lengths >= least, (lengths + TILE - 1) // TILE, 0)
        ends = counts.cumsum(0, dtype=torch.int32)
        tile = torch.arange(bound, dtype=torch.int32, device=offsets.device)
        row = torch.searchsorted(ends, tile, right=True, out_int32=True)
        known = row.clamp(max=len(counts) - 1)
        first = offsets[known] + TILE * (tile - (ends - counts)[known])
        none = row == len(counts)
        rows.found[least] = torch.stack((row.masked_fill(none, -1), first), dim=1)
    return rows.found[least], bound


@triton.jit
def load_tile(tiles, starts, slots, offsets):
    """Of this program's tile: its row (-1: there is none), first token, the first token and the
    token after the last of its row, and the row's start and slot."""
    row = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    known = tl.maximum(row, 0)
    begin = tl.load(offsets + known)
    end = tl.load(offsets + known + 1)
    return row, first, begin, end, tl.load(starts + known), tl.load(slots + known)
