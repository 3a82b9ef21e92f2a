"""Ids, positions and slot mapping of a step's tokens, and pages for the block table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import Tokens

_BLOCK = 256
_PAGES_BLOCK = 512


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
