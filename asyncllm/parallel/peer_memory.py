"""Memory on the GPUs of several processes that each of them can write to, by CUDA's IPC handles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from asyncllm.kernels.cuda_driver import load_driver

_HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class PeerMemory:
    """This rank's memory, and where it finds that of the others.

    Used by one thread, whose current CUDA context stays the same.

    Attributes:
        addresses: by rank; its own among them.

    Args:
        num_bytes: of each rank; zeros.
        exchange: gives every rank's bytes to all ranks, in their order. Called once, also by a rank
            that has no memory, which gives none.

    Raises:
        RuntimeError: some rank has no memory, or this one cannot reach another's.
    """

    def __init__(self, rank: int, num_bytes: int, exchange: Callable[[bytes], list[bytes]]):
        self.addresses: list[int] = []
        self._driver = load_driver()
        self._rank = rank
        own, handle = self._allocate(num_bytes)
        handles = exchange(handle)
        try:
            if not all(handles):
                raise RuntimeError(f"rank {handles.index(b'')} has no memory to share")
            for other, theirs in enumerate(handles):
                self.addresses.append(own if other == rank else self._open(theirs))
        except RuntimeError:
            self._free(own)
            raise

    def close(self) -> None:
        """Free it; nobody may use it any more. May be called again."""
        if self.addresses:
            self._free(self.addresses[self._rank])

    def _allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """The address and the handle of zeros; nothing if there are none."""
        address, handle = ctypes.c_uint64(), _Handle()
        if self._driver is None:
            return 0, b""
        if self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)) != 0:
            return 0, b""
        failed = self._driver.cuMemsetD8_v2(address, 0, ctypes.c_size_t(num_bytes))
        failed = failed or self._driver.cuCtxSynchronize()
        if failed or self._driver.cuIpcGetMemHandle(ctypes.byref(handle), address) != 0:
            self._driver.cuMemFree_v2(address)
            return 0, b""
        return address.value, bytes(handle)

    def _open(self, handle: bytes) -> int:
        address, flags = ctypes.c_uint64(), ctypes.c_uint(_LAZY_PEER_ACCESS)
        driver: Any = self._driver
        code = driver.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), flags
        )
        if code != 0:
            raise RuntimeError(f"a GPU cannot reach another's memory: CUDA's driver says {code}")
        return address.value

    def _free(self, own: int) -> None:
        if self._driver is None:
            return
        for address in self.addresses:
            if address != own:
                self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if own:
            self._driver.cuMemFree_v2(ctypes.c_uint64(own))
        self.addresses = []
