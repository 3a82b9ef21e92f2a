"""The ids, positions and pages of a step's tokens, some of which only the device knows."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.tokens import (
    enter_pages_reference,
    list_pages_reference,
    locate_tokens_reference,
)
from asyncllm.kernels.support import has_triton_kernels
from asyncllm.kernels.types import Tokens


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
    if has_triton_kernels(entries):
        from asyncllm.kernels.triton.tokens import locate_tokens as launch
    else:
        launch = locate_tokens_reference
    return launch(entries, last_token, block_table, page_size)


def enter_pages(new_pages: Tensor, block_table: Tensor) -> None:
    """Write pages to a block table.

    Args:
        new_pages: int32 [n, 3], contiguous: a slot, an index, and the slot's page there.
        block_table: int32 [slots, max_pages], contiguous.
    """
    if has_triton_kernels(new_pages):
        from asyncllm.kernels.triton.tokens import enter_pages as launch
    else:
        launch = enter_pages_reference
    launch(new_pages, block_table)


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
    if has_triton_kernels(block_table):
        from asyncllm.kernels.triton.tokens import list_pages as launch
    else:
        launch = list_pages_reference
    launch(block_table, slots, offsets, pages)
    return pages
