"""The ids, positions and pages of a step's tokens, some of which only the device knows."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types import Tokens


@in_triton("tokens")
def locate_tokens(
    entries: Tensor, last_token: Tensor, block_table: Tensor, page_size: int
) -> Tokens:
    """Look up sampled tokens and pages, which are on the device only.

    Args:
        entries: int32 [3, tokens]: the id, or -1 for the token sampled last in the slot; the slot;
            and the position, or -1 for padding.
        last_token: int64 [slots].
        block_table: int32 [slots, max_pages].
    """
    ids, slots, positions = entries.to(torch.int64)
    padding = positions < 0
    positions = positions.clamp(min=0)
    ids = torch.where(ids < 0, last_token[slots], ids).masked_fill(padding, 0)
    pages = block_table[slots, positions // page_size].to(torch.int64)
    slot_mapping = (pages * page_size + positions % page_size).masked_fill(padding, -1)
    return Tokens(ids, positions, slot_mapping)


@in_triton("tokens")
def enter_pages(new_pages: Tensor, block_table: Tensor) -> None:
    """Write pages to a block table.

    Args:
        new_pages: int32 [n, 3], contiguous: a slot, an index, and the slot's page there.
        block_table: int32 [slots, max_pages], contiguous.
    """
    slots, indices, pages = new_pages.unbind(1)
    block_table[slots.long(), indices.long()] = pages


@in_triton("tokens")
def settle_input(flat: Tensor, fixes: Tensor, next_position: Tensor, drafted: Tensor) -> None:
    """Correct a step's input where it depends on what only the device knows.

    Args:
        flat: int32 [n], contiguous.
        fixes: int32 [m, 4], contiguous: an index of ``flat``, and a slot. Then the start that was
            promised of the slot's row, and how many positions earlier it may start: the number
            there moves with the start. Or -1 - j and 0: the number there is the slot's draft j.
        next_position: int64 [slots]; where the next row of each slot starts.
        drafted: int64 [slots, k], contiguous.
    """
    indices, slots, promised, most = fixes.long().unbind(1)
    starts = next_position[slots].clamp(promised - most, promised)
    drafts = drafted[slots, (-1 - promised).clamp(min=0)]
    moved = flat[indices] + starts - promised
    flat[indices] = torch.where(promised < 0, drafts, moved).to(torch.int32)


@in_triton("tokens")
def verify_drafts(
    tokens: Tensor, rows: Tensor, last_token: Tensor, next_position: Tensor, drafted: Tensor
) -> Tensor:
    """How many drafted tokens of each row are right; keeps where its sequence got to.

    A draft is right if it was sampled in its place, and those before are right.

    Args:
        tokens: int64 [n]; what was sampled.
        rows: int32 [m, 4 + k], contiguous: a slot, its promised start, how many positions earlier
            it may start, the index of its first sample in ``tokens``, and k drafted tokens: -1
            where there is none, -2 for the one that ``drafted`` has in this place.
        last_token: int64 [slots]; takes the last right token of each row.
        next_position: int64 [slots]; has the start of a row that may start earlier, and takes that
            of the slot's next row.
        drafted: int64 [slots, at least k], contiguous.

    Returns:
        int32 [m].
    """
    slots, promised, most, first = rows[:, :4].long().unbind(1)
    drafts = rows[:, 4:].long()
    places = torch.arange(drafts.shape[1], device=rows.device)
    known = drafted[slots][:, : len(places)]
    drafts = torch.where(drafts == -2, known, drafts) if len(places) else drafts
    sampled = tokens[(first[:, None] + places).clamp(max=len(tokens) - 1)]
    right = ((sampled == drafts) & (drafts != -1)).long().cumprod(1).sum(1)
    starts = next_position[slots].clamp(promised - most, promised)
    last_token[slots] = tokens[first + right].clamp(min=0)
    next_position[slots] = starts + 1 + right
    return right.to(torch.int32)


def list_pages(
    block_table: Tensor, slots: Tensor, offsets: Tensor, num_pages: int | None = None
) -> Tensor:
    """The pages of rows, one row after the other.

    Args:
        block_table: int32 [slots, max_pages], contiguous.
        slots: int32 [rows].
        offsets: int32 [rows + 1]: row i has the first ``offsets[i + 1] - offsets[i]`` pages of its
            slot, as elements ``offsets[i]`` and following of the result. The host does not read
            them, so a captured launch can serve other rows later.
        num_pages: at least ``offsets[-1]``; by default, enough for any rows.

    Returns:
        int32 [num_pages]; elements from ``offsets[-1]`` on are undefined.
    """
    if num_pages is None:
        num_pages = len(slots) * block_table.shape[1]
    pages = block_table.new_empty(num_pages)
    fill_pages(block_table, slots, offsets, pages)
    return pages


@in_triton("tokens")
def fill_pages(block_table: Tensor, slots: Tensor, offsets: Tensor, pages: Tensor) -> None:
    """``list_pages`` into ``pages``. Sizes do not depend on contents: it can be captured."""
    if len(slots) == 0:
        return
    elements = torch.arange(len(pages), dtype=offsets.dtype, device=offsets.device)
    rows = torch.searchsorted(offsets, elements, right=True).sub_(1).clamp_(max=len(slots) - 1)
    columns = (elements - offsets[rows]).clamp_(max=block_table.shape[1] - 1)
    pages.copy_(block_table[slots[rows].long(), columns.long()])
