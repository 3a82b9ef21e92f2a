"""Cuts the rows of a step into tiles of queries, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher
from asyncllm.kernels.types import PrefillRows

#: Integers of a tile.
FIELDS = tl.constexpr(5)
#: Keys of a block; the most pieces of a tile, a power of two; the fewest blocks of a piece.
KEYS = tl.constexpr(128)
MAX_PIECES = tl.constexpr(16)
MIN_BLOCKS = tl.constexpr(2)
#: Times in units of 0.1 us: a block, the rest of a piece, adding up several pieces, and a decode
#: row of some 700 tokens on all programs.
BLOCK_TIME = tl.constexpr(18)
PIECE_TIME = tl.constexpr(40)
SUM_TIME = tl.constexpr(45)
DECODE_TIME = tl.constexpr(8)
#: Rows that are cut at a time.
ROWS = 256
#: Tiles that are ranked at a time.
BLOCK = 128


def find_tiles(rows: PrefillRows, num_tokens: int, size: int, room: int = 1) -> Tensor:
    """Cut rows into tiles of up to ``size`` tokens of one row; once, for all layers of a step.

    Args:
        num_tokens: of all rows, at most.
        room: tiles, or pieces of them, that run at the same time.

    Returns:
        int32 [1 + n, FIELDS], n at least the number of tiles. First the number of tiles and the
        number of pieces to cut each into; then for each tile its first token, the token after its
        last, the difference between position and token, its slot, and the length of its sequence.
        Tiles with more keys take longer, and come first.
    """
    if (size, room) not in rows.tiles:
        slots, starts, q_offsets = rows.slots, rows.starts, rows.q_offsets
        bound = num_tokens // size + len(slots)
        tiles = torch.empty(1 + bound, FIELDS.value, dtype=torch.int32, device=slots.device)
        unsorted = torch.empty(bound, FIELDS.value, dtype=torch.int32, device=slots.device)
        args = (slots, starts, q_offsets, unsorted, tiles, len(slots), size, room)
        _launch((1, 1, 1), args, (ROWS, BLOCK), num_warps=8)
        rows.tiles[size, room] = tiles
    return rows.tiles[size, room]


@triton.jit
def load_tile(
    q, block_table, tiles, tile, kv_head, table_stride, q_token_stride, q_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """The queries of a tile, [QUERIES, DIMS], and where they are.

    Returns:
        The queries and the mask of those that exist; of each its token, its head and its position
        in the sequence; the position of the first one, and that after the last; the row's pages.
    """
    entry = tiles + (1 + tile) * FIELDS
    first = tl.load(entry)
    end = tl.load(entry + 1)
    shift = tl.load(entry + 2)
    table = block_table + tl.load(entry + 3).to(tl.int64) * table_stride
    lane = tl.arange(0, QUERIES)
    token = first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    dim = tl.arange(0, DIMS)
    is_query = (lane < QUERIES // GROUP * GROUP) & (token < end)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = token.to(tl.int64) * q_token_stride + head * q_head_stride
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
    return queries, inside, token, head, token + shift, first + shift, end + shift, table


@triton.jit(do_not_specialize=["slots", "starts", "q_offsets", "num_rows", "size", "room"])
def _find_tiles(
    slots,
    starts,
    q_offsets,
    unsorted,
    tiles,
    num_rows,
    size,
    room,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    found = 0
    for base in range(0, num_rows, ROWS):
        found += _cut(slots, starts, q_offsets, unsorted, base, found, num_rows, size, ROWS)
    # Threads read tiles that other threads have written.
    tl.debug_barrier()
    longest = _sort(unsorted, tiles, found, BLOCK)
    tl.store(tiles, found)
    # Tokens before the first row are decode rows.
    tl.store(tiles + 1, _best_pieces(found, tl.cdiv(longest, KEYS), tl.load(q_offsets), room))


@triton.jit
def _cut(slots, starts, q_offsets, unsorted, base, found, num_rows, size, ROWS: tl.constexpr):
    """Append the tiles of ROWS rows from ``base`` on; returns how many."""
    row = base + tl.arange(0, ROWS)
    exists = row < num_rows
    first = tl.load(q_offsets + row, mask=exists, other=0)
    end = tl.load(q_offsets + row + 1, mask=exists, other=0)
    shift = tl.load(starts + row, mask=exists, other=0).to(tl.int32) - first
    slot = tl.load(slots + row, mask=exists, other=0).to(tl.int32)
    count = (end - first + size - 1) // size
    entry = unsorted + (found + tl.cumsum(count, 0) - count) * FIELDS
    for _ in range(tl.max(count, 0)):
        more = first < end
        tl.store(entry, first, mask=more)
        tl.store(entry + 1, tl.minimum(first + size, end), mask=more)
        tl.store(entry + 2, shift, mask=more)
        tl.store(entry + 3, slot, mask=more)
        tl.store(entry + 4, end + shift, mask=more)
        first += size
        entry += FIELDS
    return tl.sum(count, 0)


@triton.jit
def _sort(unsorted, tiles, found, BLOCK: tl.constexpr):
    """Store tiles in order, those with most keys first; returns the most keys.

    A tile's place is the number of tiles that come before it. No size depends on the step, so one
    variant serves all of them, and usually one block holds all tiles.
    """
    longest = 0
    for base in range(0, found, BLOCK):
        index = base + tl.arange(0, BLOCK)
        keys = _keys(unsorted, index, found)
        place = tl.zeros([BLOCK], tl.int32)
        for start in range(0, found, BLOCK):
            other = start + tl.arange(0, BLOCK)
            others = _keys(unsorted, other, found)[None, :]
            is_later = other[None, :] > index[:, None]
            before = (others > keys[:, None]) | ((others == keys[:, None]) & is_later)
            place += tl.sum(before.to(tl.int32), 1)
        exists = index < found
        for field in tl.static_range(FIELDS):
            value = tl.load(unsorted + index * FIELDS + field, mask=exists)
            tl.store(tiles + (1 + place) * FIELDS + field, value, mask=exists)
        longest = tl.maximum(longest, tl.max(keys, 0))
    return longest


@triton.jit
def _keys(unsorted, index, found):
    """The keys that tiles attend to; -1 after the last tile."""
    exists = index < found
    end = tl.load(unsorted + index * FIELDS + 1, mask=exists, other=0)
    shift = tl.load(unsorted + index * FIELDS + 2, mask=exists, other=-1)
    return end + shift


@triton.jit
def _best_pieces(tiles, blocks, decoding, room):
    """The number of pieces of each tile for which the step takes the least time.

    Decode rows run at the same time on idle programs, and afterwards on all.
    """
    pieces = 1 + tl.arange(0, MAX_PIECES)
    share = tl.maximum(tl.cdiv(blocks, pieces), tl.minimum(blocks, MIN_BLOCKS))
    time = share * BLOCK_TIME + PIECE_TIME + tl.where(pieces > 1, SUM_TIME, 0)
    idle = tl.maximum(room - tiles * pieces, 0)
    time += tl.maximum(decoding * DECODE_TIME - time * idle // room, 0)
    time = tl.where((tiles * pieces <= room) | (pieces == 1), time, 1 << 24)
    return tl.min(time * MAX_PIECES + pieces - 1, 0) % MAX_PIECES + 1


_launch = Launcher(_find_tiles)
