"""The host tier of the KV cache: pages in host memory."""

from __future__ import annotations

from asyncllm.errors import ModelError
from asyncllm.executor.device import Device
from asyncllm.executor.memory.kv_pool import KVPool


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
