"""From the tokens and pages of a plan to what the model is given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels


class Tokens(NamedTuple):
    """The tokens of a step, int64 [tokens] each.

    ``written`` is where their K and V go in the flattened pages; -1, nowhere, is padding, which has
    id and position 0.
    """

    input_ids: Tensor
    positions: Tensor
    written: Tensor


def locate_tokens(
    entries: Tensor, last_token: Tensor, block_table: Tensor, page_size: int
) -> Tokens:
    """Look up what only the device knows: tokens it has sampled, and pages.

    Args:
        entries: int32 [3, tokens]: the id, or -1 for the token sampled last in the slot; the slot;
            and the position, or -1 for padding.
        last_token: int64 [slots].
        block_table: int32 [slots, max_pages].
    """
    if has_triton_kernels(entries):
        from asyncllm.kernels.triton.tokens import locate_tokens as launch

        return Tokens(*launch(entries, last_token, block_table, page_size))
    return locate_tokens_reference(entries, last_token, block_table, page_size)


def locate_tokens_reference(
    entries: Tensor, last_token: Tensor, block_table: Tensor, page_size: int
) -> Tokens:
    """``locate_tokens`` in plain torch."""
    ids, slots, positions = entries.to(torch.int64)
    padding = positions < 0
    positions = positions.clamp(min=0)
    ids = torch.where(ids < 0, last_token[slots], ids).masked_fill(padding, 0)
    pages = block_table[slots, positions // page_size].to(torch.int64)
    written = (pages * page_size + positions % page_size).masked_fill(padding, -1)
    return Tokens(ids, positions, written)


def enter_pages(new_pages: Tensor, block_table: Tensor) -> None:
    """Write pages to a block table.

    Args:
        new_pages: int32 [n, 3], contiguous: a slot, an index, and the slot's page there.
        block_table: int32 [slots, max_pages], contiguous.
    """
    if has_triton_kernels(new_pages):
        from asyncllm.kernels.triton.tokens import enter_pages as launch

        launch(new_pages, block_table)
    else:
        enter_pages_reference(new_pages, block_table)


def enter_pages_reference(new_pages: Tensor, block_table: Tensor) -> None:
    """``enter_pages`` in plain torch."""
    slots, indices, pages = new_pages.unbind(1)
    block_table[slots.long(), indices.long()] = pages


__all__ = [
    "Tokens",
    "enter_pages",
    "enter_pages_reference",
    "locate_tokens",
    "locate_tokens_reference",
]
