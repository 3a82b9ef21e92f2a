"""A ring of pinned host buffers for copies to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Copies in flight before the host waits for the first of them. A step has up to seven, and two for
#: every 32 rows with penalties; two steps are in flight.
COPIES = 64
#: A buffer's first size, enough for the tokens of most steps; a buffer grows when needed, but
#: locking memory takes up to a millisecond.
MIN_BYTES = 1 << 17


class PinnedRing:
    """For copies on one stream; a buffer is used again once the copy from it is done."""

    def __init__(self) -> None:
        self._buffers = [_Buffer(part) for part in _pinned(COPIES * MIN_BYTES).split(MIN_BYTES)]
        self._turn = 0

    def upload(self, array: np.ndarray, device: torch.device) -> Tensor:
        """A new tensor on the device, ordered before kernels launched later."""
        buffer = self._next(array)
        tensor = buffer.holding(array).to(device, non_blocking=True)
        buffer.copied.record()
        return tensor

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a contiguous tensor of the array's shape and type, likewise ordered."""
        buffer = self._next(array)
        target.copy_(buffer.holding(array), non_blocking=True)
        buffer.copied.record()

    def _next(self, array: np.ndarray) -> _Buffer:
        self._turn = (self._turn + 1) % COPIES
        buffer = self._buffers[self._turn]
        buffer.wait(array.nbytes)
        return buffer


class _Buffer:
    def __init__(self, memory: Tensor) -> None:
        self.copied = torch.cuda.Event()
        self._memory = memory

    def wait(self, num_bytes: int) -> None:
        """Wait until the buffer is free, and make it large enough."""
        # An event that was never recorded is done. ``synchronize`` would also give up the GIL, and
        # wait to get it back.
        if not self.copied.query():
            self.copied.synchronize()
        if self._memory.nbytes < num_bytes:
            self._memory = _pinned(1 << (num_bytes - 1).bit_length())

    def holding(self, array: np.ndarray) -> Tensor:
        """The array, in pinned memory."""
        view = self._memory.numpy()[: array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return torch.from_numpy(view)


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
