"""The memory of the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """K and V of every layer, in pages of ``page_size`` tokens (``attention.base.KVPages``).

    Only ``cache/`` knows which pages are free or shared. Page 0 is a page like any other, and also
    pads block tables, so results must not depend on what is read there.

    Zeroing the pool commits the memory, so a machine that cannot hold it fails at start-up, not
    under load. It says nothing about later contents: a page keeps what its last owner wrote. This
    may be NaN, and a mask does not help, as 0 * NaN is NaN. So a backend reads only a row's own
    positions, 0 .. start+q_len-1.

    The step writes positions from ``start`` on, and only those, because pages before it may be
    shared: they were written by earlier steps of sequences with the same prefix, or copied from the
    host tier.

    Attributes:
        storage: [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim].
        page_bytes: of one page in all layers.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.storage = torch.zeros(
            (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim),
            dtype=dtype,
            device=device,
        )
        self.page_bytes = self.storage.nbytes // num_pages
        self._layers = [(self.storage[i, 0], self.storage[i, 1]) for i in range(num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_pages, page_size, num_kv_heads, head_dim]; contiguous."""
        return self._layers[index]
