"""The memory of the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.executor.device import Device, host_zeros
from asyncllm.kernels.types import AttentionSpec


class KVPool:
    """K and V of every layer, in pages of ``page_size`` tokens (``attention.base.KVPages``).

    Only ``engine/cache/`` knows which pages are free or shared. Page 0 is a page like any other,
    and also pads block tables, so results must not depend on what is read there.

    Zeroing the pool commits the memory, so a machine that cannot hold it fails at start-up, not
    under load. It says nothing about later contents: a page keeps what its last owner wrote. This
    may be NaN, and a mask does not help, as 0 * NaN is NaN. So a backend reads only a row's own
    positions, 0 .. start+q_len-1.

    The step writes positions from ``start`` on, and only those, because pages before it may be
    shared: they were written by earlier steps of sequences with the same prefix, or copied from the
    host tier.

    A page is all layers' K and V of the same tokens, whatever shapes they have. Layers that read
    those of another (``AttentionSpec.shares``) have no part of it.

    Args:
        specs: of all layers.
        dtype: of the computation, or e4m3: see ``kernels.attention``.
        scales: of layers in e4m3, by layer; 1 for those that are not named. They must not change
            while a page is used.

    Attributes:
        storage: one dimension: K of all pages in the first layer, V, then the next layer.
        parts: elements of a page's K and V in each layer, in that order.
        page_bytes: of one page in all layers.
        first_layer: that has K and V.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        own = [spec for spec in specs if spec.shares is None]
        self.num_pages = num_pages
        self.page_size = page_size
        self.first_layer = own[0].layer
        self.parts = [spec.kv_size // 2 * page_size for spec in own for _ in range(2)]
        size = num_pages * sum(self.parts)
        if torch.device(device).type == "cpu":
            self.storage = host_zeros(size * dtype.itemsize).view(dtype)
        else:
            self.storage = torch.zeros(size, dtype=dtype, device=device)
        self.page_bytes = self.storage.nbytes // num_pages
        self._scales = dict(scales) if self.storage.itemsize == 1 else {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        parts = iter(self.storage.split([num_pages * part for part in self.parts]))
        for spec in own:
            shape = num_pages, page_size, spec.num_kv_heads, spec.head_dim
            self._layers[spec.layer] = next(parts).view(shape), next(parts).view(shape)
            if self.storage.itemsize == 1 and spec.layer not in scales:
                self._scales[spec.layer] = torch.ones(2, spec.num_kv_heads, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_pages, page_size, num_kv_heads, head_dim]; contiguous."""
        return self._layers[index]

    def scales(self, index: int) -> Tensor | None:
        """Of one layer in e4m3: float32 [2, num_kv_heads]; None in the dtype of the computation."""
        return self._scales.get(index)


class HostPool:
    """K and V of ``num_pages`` pages, each one contiguous block, so that it moves in one transfer.

    The memory belongs to the device: it is page-locked, and valid until ``Device.release``.

    Args:
        pool: the pool whose pages it stores.

    Attributes:
        storage: [num_pages, elements of a page], in the pool's dtype and the order of its parts.

    Raises:
        ModelError: there is not enough memory, or it cannot be locked.
    """

    def __init__(self, pool: KVPool, num_pages: int, device: Device) -> None:
        num_bytes = num_pages * pool.page_bytes
        try:
            memory = device.host_memory(num_bytes)
        except (MemoryError, RuntimeError) as error:
            raise ModelError(
                f"{num_bytes / 2**30:.2f} GiB of host memory for KV pages cannot be had: "
                f"{str(error).splitlines()[0]} (a smaller host_kv_gib needs less)",
                param="host_kv_gib",
            ) from None
        self.num_pages = num_pages
        self.storage = memory.view(pool.storage.dtype).view(num_pages, sum(pool.parts))
