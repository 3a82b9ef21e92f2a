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
