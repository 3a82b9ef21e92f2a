"""Who waits for whom on a GPU: nobody, or as long as a test says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

import torch

_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
#: Seconds after which a gate opens by itself: what waits for it by mistake fails, and ends.
_PATIENCE = 30.0


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def gate() -> Iterator[Callable[[], None]]:
    """Yields what holds up the current stream until the block ends.

    Unlike a kernel that takes a known time, it holds however slow the host is, or however many
    processes share the GPU.
    """
    is_open = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def hold() -> None:
        status = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.c_uint64(is_open.data_ptr()),
            ctypes.c_uint32(1),
            ctypes.c_uint(_UNTIL_EQUAL),
        )
        assert status == 0

    timer = Timer(_PATIENCE, is_open.fill_, [1])
    timer.daemon = True
    timer.start()
    try:
        yield hold
    finally:
        timer.cancel()
        is_open.fill_(1)
