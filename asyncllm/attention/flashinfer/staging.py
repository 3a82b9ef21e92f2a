"""Pinned memory from which plans are copied to the device."""

from __future__ import annotations

from collections import deque

import torch

#: The least size of a buffer; locking memory takes a while, so most buffers never grow.
MIN_BYTES = 1 << 17


class Staging:
    """Buffers for copies on one stream; one is used again when the copy from it is done.

    Nothing here waits for a copy: if all are under way, there is one more buffer. So there are as
    many as plans are made while two steps are in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type == "cuda"
        self._buffers: deque[Buffer] = deque()

    def take(self, num_bytes: int) -> Buffer:
        """A buffer that no copy reads, with at least so many bytes."""
        if self._buffers and self._buffers[0].is_free():
            buffer = self._buffers.popleft()
        else:
            buffer = Buffer(self._pins)
        buffer.grow(num_bytes)
        self._buffers.append(buffer)
        return buffer


class Buffer:
    """Memory for one copy at a time; who takes it calls ``record`` once the copy is launched.

    Attributes:
        memory: uint8.
    """

    def __init__(self, pins: bool) -> None:
        self._pins = pins
        self._copied = torch.cuda.Event() if pins else None
        self.memory = torch.empty(0, dtype=torch.uint8)

    def is_free(self) -> bool:
        """Whether the last copy from it is done."""
        return self._copied is None or self._copied.query()

    def grow(self, num_bytes: int) -> None:
        """Have at least so many bytes; contents are lost if it did not."""
        if len(self.memory) < num_bytes:
            size = max(MIN_BYTES, 1 << (num_bytes - 1).bit_length())
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)

    def record(self) -> None:
        """The copy is among what was launched so far on the current stream."""
        if self._copied is not None:
            self._copied.record()
