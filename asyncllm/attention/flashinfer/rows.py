"""The rows of a step as FlashInfer takes them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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


class HostRows(NamedTuple):
    """Rows on the host, int32.

    The first row is nobody's and has no keys. Its queries are the tokens that come before the first
    real row, because FlashInfer wants the first row to begin at token 0. Whoever attends these
    tokens has to overwrite its results. Besides, FlashInfer pads a captured launch with work for
    the first row, which is none.

    Attributes:
        q_indptr: [rows + 1], the first token of each row, and the end of the last.
        kv_indptr: [rows + 1], likewise for its pages among the pages of all rows.
        lengths: [rows]; the row's keys, those of its own tokens included. 0 is padding.
        last_page_len: [rows]; how many of them are in the row's last page.
        slots: [rows].
    """

    q_indptr: np.ndarray
    kv_indptr: np.ndarray
    lengths: np.ndarray
    last_page_len: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(
        cls,
        rows: np.ndarray,
        page_size: int,
        before: int = 0,
        padded_rows: int | None = None,
        padding_tokens: int = 0,
    ) -> HostRows:
        """From (slot, start, q_len).

        Args:
            rows: integers [n, 3].
            before: tokens of the step that come before those of the first row.
            padded_rows: add rows without keys until there are so many, besides the first row.
            padding_tokens: queries of each added row. FlashInfer's result for them is 0.
        """
        count = len(rows) if padded_rows is None else padded_rows
        slots, starts, q_lens = np.zeros((3, count + 1), dtype=np.int32)
        slots[1 : len(rows) + 1], starts[1 : len(rows) + 1], _ = rows.T
        q_lens[0] = before
        q_lens[1 : len(rows) + 1] = rows[:, 2]
        lengths = starts + q_lens
        lengths[0] = 0
        q_lens[len(rows) + 1 :] = padding_tokens
        num_pages = -(-lengths // page_size)
        last_page_len = lengths - np.maximum(num_pages - 1, 0) * page_size
        return cls(_indptr(q_lens), _indptr(num_pages), lengths, last_page_len, slots)

    def without_first(self) -> HostRows:
        """The real rows, and padding."""
        return HostRows(*(array[1:] for array in self))


class DeviceRows(NamedTuple):
    """The rows of a step on the device, for kernels; int32.

    Attributes:
        q_indptr, kv_indptr, last_page_len, slots: as in ``HostRows``.
        pages: [at least kv_indptr[-1]], the pages of all rows.
    """

    q_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    slots: Tensor
    pages: Tensor

    def without_first(self) -> DeviceRows:
        """The real rows, and padding."""
        q_indptr, kv_indptr, last_page_len, slots, pages = self
        return DeviceRows(q_indptr[1:], kv_indptr[1:], last_page_len[1:], slots[1:], pages)


def _indptr(counts: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: 0 and the cumulative sums of n counts."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
