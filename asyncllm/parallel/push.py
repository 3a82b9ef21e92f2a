"""Collectives of small tensors by our own kernels, which take half of NCCL's time or less."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from asyncllm.kernels.cuda_driver import load_driver
from asyncllm.kernels.triton.collectives.all_gather import rows_of_all
from asyncllm.kernels.triton.collectives.all_reduce import sum_in_one_shot, sum_in_two_shots
from asyncllm.kernels.triton.collectives.push import Channel, blocks_of, place_bytes
from asyncllm.kernels.triton.launch import cdiv
from asyncllm.parallel.collectives import Collectives

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


#: Most blocks of 3 KiB that a rank pushes in a launch: 12 MiB. Larger launches were not measured,
#: and none between more than two GPUs.
PUSHES: Final = 4096
#: Two shots take one crossing of the link more than one shot, and push fewer blocks. These many
#: fewer, 384 KiB, take as long as a crossing: 1.4 us between two H200s.
CROSSING: Final = 128
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class PushCollectives:
    """Small tensors by pushing them, others as ``larger`` does.

    Made and used in one thread.

    Args:
        exchange: see ``PeerMemory``.

    Raises:
        RuntimeError: a GPU cannot write to another's memory.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        larger: Collectives,
        exchange: Callable[[bytes], list[bytes]],
    ):
        self._larger = larger
        programs = most_programs(size)
        self._memory = PeerMemory(rank, place_bytes(programs, size), exchange)
        self._gives_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        memories = torch.tensor(self._memory.addresses, device=device)
        counts = torch.zeros(programs, dtype=torch.int32, device=device)
        self._channel = Channel(memories, counts, self._gives_up, rank)

    def sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        push = sum_for(x, len(self._channel.memories))
        if push is None:
            return self._larger.sum(x, residual)
        return push(x, residual, self._channel)

    def gather(self, x: Tensor) -> Tensor:
        if not is_gathered(x, len(self._channel.memories)):
            return self._larger.gather(x)
        return rows_of_all(x.contiguous(), self._channel)

    def broadcast(self, x: Tensor) -> None:
        self._larger.broadcast(x)

    def abort(self) -> None:
        self._gives_up.fill_(1)
        self._larger.abort()

    def close(self) -> None:
        self._memory.close()
        self._larger.close()


def most_programs(size: int) -> int:
    """Of the largest launch of so many ranks."""
    return PUSHES // (size - 1)


def sum_for(x: Tensor, size: int) -> Callable[[Tensor, Tensor | None, Channel], Tensor] | None:
    """How so many ranks push a sum of x; None where they do not."""
    if not _has_words(x, x.numel()):
        return None
    blocks = blocks_of(x)
    one_shot = blocks * (size - 1)
    two_shots = 2 * cdiv(blocks, size) * (size - 1)
    if one_shot - two_shots <= CROSSING:
        return sum_in_one_shot if one_shot <= PUSHES else None
    return sum_in_two_shots if two_shots <= PUSHES else None


def is_gathered(x: Tensor, size: int) -> bool:
    """Whether so many ranks push the rows of x, rather than gather them in another way."""
    return _has_words(x, x.shape[1]) and blocks_of(x) <= most_programs(size)


def _has_words(x: Tensor, values: int) -> bool:
    """Whether x can be pushed, and so many of its values fill whole words of 32 bits."""
    return x.numel() > 0 and x.dtype in _DTYPES and values * x.itemsize % 4 == 0
