"""Stream tensors of safetensors files to a GPU at the speed of the disk, the page cache or the bus.

A copy from a mapped file is one thread's page faults and the driver's own small buffers. Here
several threads read blocks into page-locked memory, while the calling thread, which alone speaks to
the GPU, sends on those that are full.

GB/s on an H200 with 16 cores, a file of 4 GiB:

| way                              | in the page cache      | not there             |
|----------------------------------|------------------------|-----------------------|
| mapped, one thread               | 8.0                    | 2.2                   |
| 1 / 2 / 4 / 8 readers of 16 MiB  | 8.2 / 15.9 / 23 / 21.8 | 2.8 with 8            |
| 8 readers of 4 MiB               | 28.5                   | the disk's own speed  |
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

#: Threads that read; the size of a block; and how many there are: some are on the bus meanwhile.
READERS = 8
BLOCK_BYTES = 4 << 20
BLOCKS = 2 * READERS

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Piece(NamedTuple):
    """As much of a tensor as fits into a block.

    Attributes:
        offset, num_bytes: in the file.
        dtype: in the file.
        place: [elements] on the device.
    """

    offset: int
    num_bytes: int
    dtype: torch.dtype
    place: Tensor


class WeightStream:
    """Copies tensors to contiguous places on a GPU; its buffers live as long as it does."""

    def __init__(self) -> None:
        self._blocks = torch.empty(BLOCKS, BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sent = [torch.cuda.Event() for _ in range(BLOCKS)]

    def copy(self, file: Path, places: Mapping[str, Tensor]) -> Iterator[int]:
        """Copy tensors of a file, by name, to their places, in the dtype that is there.

        Args:
            file: a valid safetensors file that has them, in these shapes.

        Yields:
            Bytes sent, again and again; the copies are done when the current stream is.
        """
        pieces = list(_pieces(file, places))
        descriptor = os.open(file, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(READERS) as readers:
                reads: deque[tuple[int, Piece, Future[None]]] = deque()
                for number, piece in enumerate(pieces):
                    if len(reads) == READERS:
                        yield self._send(*reads.popleft())
                    turn = number % BLOCKS
                    self._sent[turn].synchronize()  # at once, if it was never recorded
                    block = self._blocks[turn, : piece.num_bytes]
                    reads.append((turn, piece, readers.submit(_read, descriptor, piece, block)))
                while reads:
                    yield self._send(*reads.popleft())
        finally:
            os.close(descriptor)

    def _send(self, turn: int, piece: Piece, read: Future[None]) -> int:
        """Once it is read, queue the copy."""
        read.result()
        values = self._blocks[turn, : piece.num_bytes].view(piece.dtype)
        if piece.dtype != piece.place.dtype:  # converted there, not by the host
            values = values.to(piece.place.device, non_blocking=True)
        piece.place.copy_(values, non_blocking=True)
        self._sent[turn].record()
        return piece.num_bytes


def _pieces(file: Path, places: Mapping[str, Tensor]) -> Iterator[Piece]:
    """In the order of the file, which is read from its beginning to its end."""
    with open(file, "rb") as raw:
        header_bytes = int.from_bytes(raw.read(8), "little")
        header = msgspec.json.decode(raw.read(header_bytes))
    for name in sorted(places, key=lambda name: header[name]["data_offsets"][0]):
        begin, end = (8 + header_bytes + at for at in header[name]["data_offsets"])
        dtype, place = _DTYPES[header[name]["dtype"]], places[name].view(-1)
        for offset in range(begin, end, BLOCK_BYTES):
            num_bytes = min(BLOCK_BYTES, end - offset)
            first, count = (offset - begin) // dtype.itemsize, num_bytes // dtype.itemsize
            yield Piece(offset, num_bytes, dtype, place[first : first + count])


def _read(descriptor: int, piece: Piece, block: Tensor) -> None:
    """Fill the block; in another thread, with the GIL released."""
    view = block.numpy().data
    done = 0
    while done < piece.num_bytes:
        count = os.preadv(descriptor, [view[done:]], piece.offset + done)
        if count == 0:
            raise OSError("a file of weights ends before its tensors do")
        done += count


__all__ = ["WeightStream"]
