"""The memory of the paged KV cache: one allocation, handed out layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """K and V of every layer, in pages of ``page_size`` tokens (``attention.base.KVPages``).

    No page is special: which pages are free, shared or pinned is known to ``cache/`` alone, and
    page 0 is handed out like any other. A backend may be given page 0 as padding of a block table;
    it must not let anything read there reach a result.

    The pool is zeroed once, which commits the memory: a machine that cannot hold the pool fails
    here and not under load. It is no promise about the contents. A page keeps whatever its last
    owner wrote, NaN of a broken row included, and 0 * NaN is NaN, so a mask does not make a foreign
    position harmless: backends must read nothing but a row's own positions, 0 to start+q_len-1.

    The step itself writes those from ``start`` on. Those before it were written by earlier steps,
    by rows of this sequence or of others with the same prefix, or by a copy from the host tier;
    sequences may share such pages, so a row writes to none but its own positions either.

    Args:
        dtype: of the stored K and V.
        device: where the pool lives.

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
