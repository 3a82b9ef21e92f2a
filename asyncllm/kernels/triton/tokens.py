"""Ids, positions and slot mapping of a step's tokens, and pages for the block table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import Tokens

_BLOCK = 256
_PAGES_BLOCK = 512
#: More than a row can have drafted tokens.
_DRAFTS_BLOCK = 128


# One variant for all alignments, since nothing here is loaded in vectors.
@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["entries", "last_token", "block_table", "located"],
)
def _locate_tokens(
    entries,
    last_token,
    block_table,
    located,
    count,
    MAX_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = tokens < count
    ids = tl.load(entries + tokens, mask=exists)
    slots = tl.load(entries + count + tokens, mask=exists).to(tl.int64)
    positions = tl.load(entries + 2 * count + tokens, mask=exists, other=-1)
    real = exists & (positions >= 0)
    sampled = tl.load(last_token + slots, mask=real & (ids < 0), other=0)
    pages = tl.load(block_table + slots * MAX_PAGES + positions // PAGE_SIZE, mask=real, other=0)
    slot_mapping = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    ids = tl.where(ids < 0, sampled, ids.to(tl.int64))
    tl.store(located + tokens, tl.where(real, ids, 0), mask=exists)
    tl.store(located + count + tokens, tl.where(real, positions.to(tl.int64), 0), mask=exists)
    tl.store(located + 2 * count + tokens, tl.where(real, slot_mapping, -1), mask=exists)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["new_pages", "block_table"]
)
def _enter_pages(
    new_pages,
    block_table,
    count,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entries < count
    slots = tl.load(new_pages + 3 * entries, mask=exists).to(tl.int64)
    indices = tl.load(new_pages + 3 * entries + 1, mask=exists)
    pages = tl.load(new_pages + 3 * entries + 2, mask=exists)
    tl.store(block_table + slots * MAX_PAGES + indices, pages, mask=exists)


@triton.jit(
    do_not_specialize=["width", "count"],
    do_not_specialize_on_alignment=["flat", "fixes", "next_position", "drafted"],
)
def _settle_input(
    flat,
    fixes,
    next_position,
    drafted,
    width,
    count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entries < count
    indices = tl.load(fixes + 4 * entries, mask=exists, other=0)
    slots = tl.load(fixes + 4 * entries + 1, mask=exists, other=0).to(tl.int64)
    promised = tl.load(fixes + 4 * entries + 2, mask=exists, other=0)
    most = tl.load(fixes + 4 * entries + 3, mask=exists, other=0)
    moves = exists & (promised >= 0)
    starts = tl.load(next_position + slots, mask=moves, other=0)
    starts = tl.minimum(tl.maximum(starts, (promised - most).to(tl.int64)), promised.to(tl.int64))
    old = tl.load(flat + indices, mask=moves, other=0)
    is_draft = exists & (promised < 0)
    drafts = tl.load(drafted + slots * width - 1 - promised, mask=is_draft, other=0)
    new = tl.where(is_draft, drafts, old + starts - promised)
    tl.store(flat + indices, new.to(tl.int32), mask=exists)


# One program for each row.
@triton.jit(
    do_not_specialize=["width", "most_drafts"],
    do_not_specialize_on_alignment=[
        "tokens", "rows", "last_token", "next_position", "drafted", "right"
    ],
)  # fmt: skip
def _verify_drafts(
    tokens,
    rows,
    last_token,
    next_position,
    drafted,
    right,
    width,
    most_drafts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    start = rows + row * (4 + most_drafts)
    slot = tl.load(start).to(tl.int64)
    promised = tl.load(start + 1).to(tl.int64)
    most = tl.load(start + 2)
    first = tl.load(start + 3)
    places = tl.arange(0, BLOCK)
    exists = places < most_drafts
    drafts = tl.load(start + 4 + places, mask=exists, other=-1).to(tl.int64)
    known = tl.load(drafted + slot * width + places, mask=exists & (drafts == -2), other=0)
    drafts = tl.where(drafts == -2, known, drafts)
    is_draft = drafts != -1
    sampled = tl.load(tokens + first + places, mask=exists & is_draft, other=-1)
    # The first place of a draft that is wrong, or of none; there is one in each block.
    count = tl.min(tl.where(is_draft & (sampled == drafts), BLOCK, places), 0)
    last = tl.load(tokens + first + count)
    position = tl.load(next_position + slot)
    position = tl.minimum(tl.maximum(position, promised - most), promised)
    tl.store(last_token + slot, tl.maximum(last, 0))
    tl.store(next_position + slot, position + 1 + count)
    tl.store(right + row, count)


@triton.jit(
    do_not_specialize=["max_pages"],
    do_not_specialize_on_alignment=["block_table", "slots", "offsets", "pages"],
)
def _list_pages(
    block_table,
    slots,
    offsets,
    pages,
    max_pages,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    first = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < count
    slot = tl.load(slots + row).to(tl.int64)
    listed = tl.load(block_table + slot * max_pages + columns, mask=exists)
    tl.store(pages + first + columns, listed, mask=exists)


_launch = Launcher(_locate_tokens)
_launch_enter = Launcher(_enter_pages)
_launch_list = Launcher(_list_pages)
_launch_settle = Launcher(_settle_input)
_launch_verify = Launcher(_verify_drafts)


def locate_tokens(
    entries: Tensor, last_token: Tensor, block_table: Tensor, page_size: int
) -> Tokens:
    """See ``kernels.tokens.locate_tokens``; the tables are contiguous."""
    count = entries.shape[1]
    located = last_token.new_empty(3, count)
    if count:
        grid = (cdiv(count, _BLOCK), 1, 1)
        tensors = (entries, last_token, block_table, located, count)
        _launch(grid, tensors, (block_table.shape[1], page_size, _BLOCK), num_warps=4)
    return Tokens(*located.unbind())


def enter_pages(new_pages: Tensor, block_table: Tensor) -> None:
    """See ``kernels.tokens.enter_pages``; the table is contiguous."""
    count = len(new_pages)
    if count:
        grid = (cdiv(count, _BLOCK), 1, 1)
        tensors = (new_pages, block_table, count)
        _launch_enter(grid, tensors, (block_table.shape[1], _BLOCK), num_warps=4)


def fill_pages(block_table: Tensor, slots: Tensor, offsets: Tensor, pages: Tensor) -> None:
    """See ``kernels.tokens.fill_pages``; all are contiguous."""
    max_pages = block_table.shape[1]
    if len(slots):
        grid = (len(slots), cdiv(max_pages, _PAGES_BLOCK), 1)
        arguments = (block_table, slots, offsets, pages, max_pages)
        _launch_list(grid, arguments, (_PAGES_BLOCK,), num_warps=4)


def settle_input(flat: Tensor, fixes: Tensor, next_position: Tensor, drafted: Tensor) -> None:
    """See ``kernels.tokens.settle_input``; all are contiguous."""
    count = len(fixes)
    if count:
        grid = (cdiv(count, _BLOCK), 1, 1)
        tensors = (flat, fixes, next_position, drafted, drafted.shape[1], count)
        _launch_settle(grid, tensors, (_BLOCK,), num_warps=4)


def verify_drafts(
    tokens: Tensor, rows: Tensor, last_token: Tensor, next_position: Tensor, drafted: Tensor
) -> Tensor:
    """See ``kernels.tokens.verify_drafts``; all are contiguous."""
    count, most, width = len(rows), rows.shape[1] - 4, drafted.shape[1]
    right = rows.new_empty(count)
    if count:
        tensors = (tokens, rows, last_token, next_position, drafted, right, width, most)
        _launch_verify((count, 1, 1), tensors, (_DRAFTS_BLOCK,), num_warps=1)
    return right
