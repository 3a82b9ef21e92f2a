from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.types import Tokens


def locate_tokens_reference(
    entries: Tensor, last_token: Tensor, block_table: Tensor, page_size: int
) -> Tokens:
    """See ``kernels.tokens.locate_tokens``."""
    ids, slots, positions = entries.to(torch.int64)
    padding = positions < 0
    positions = positions.clamp(min=0)
    ids = torch.where(ids < 0, last_token[slots], ids).masked_fill(padding, 0)
    pages = block_table[slots, positions // page_size].to(torch.int64)
    slot_mapping = (pages * page_size + positions % page_size).masked_fill(padding, -1)
    return Tokens(ids, positions, slot_mapping)


def enter_pages_reference(new_pages: Tensor, block_table: Tensor) -> None:
    """See ``kernels.tokens.enter_pages``."""
    slots, indices, pages = new_pages.unbind(1)
    block_table[slots.long(), indices.long()] = pages


def list_pages_reference(
    block_table: Tensor, slots: Tensor, offsets: Tensor, pages: Tensor
) -> None:
    """See ``kernels.tokens.list_pages``. Sizes do not depend on contents: it can be captured."""
    if len(slots) == 0:
        return
    elements = torch.arange(len(pages), dtype=offsets.dtype, device=offsets.device)
    rows = torch.searchsorted(offsets, elements, right=True).sub_(1).clamp_(max=len(slots) - 1)
    columns = (elements - offsets[rows]).clamp_(max=block_table.shape[1] - 1)
    pages.copy_(block_table[slots[rows].long(), columns.long()])
