"""Work on a GPU that is not done before a test says so."""

from __future__ import annotations

import ctypes
from threading import Timer
from types import TracebackType

import torch

_UNTIL_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
#: Seconds after which a gate opens by itself: what waits for it by mistake fails, and ends.
_PATIENCE = 30.0


class Gate:
    """Holds up what is launched on a stream after ``hold``, until the block of ``with`` ends.

    Unlike a kernel that takes a known time, it holds however slow the host is, or however many
    processes share the GPU.
    """

    def __init__(self) -> None:
        self._is_open = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._timer = Timer(_PATIENCE, self._open)
        self._timer.daemon = True

    def hold(self) -> None:
        """Hold up the current stream."""
        stream, flag = torch.cuda.current_stream().cuda_stream, self._is_open.data_ptr()
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        status = wait(
            ctypes.c_void_p(stream),
            ctypes.c_uint64(flag),
            ctypes.c_uint32(1),
            ctypes.c_uint(_UNTIL_EQUAL),
        )
        assert status == 0

    def __enter__(self) -> Gate:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._open()

    def _open(self) -> None:
        self._is_open.fill_(1)
