"""The ids, positions and pages of a step's tokens, some of which only the device knows."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.tokens import enter_pages_reference, locate_tokens_reference
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
