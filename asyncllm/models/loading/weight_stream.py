"""Stream tensors of files to a GPU at the speed of the disk, the page cache or the bus.

A copy from a mapped file is limited by one thread's page faults and the driver's small buffers.
Here several threads read blocks of files into page-locked memory, and the calling thread, the only
one that uses the GPU, uploads the tensors in them.

On an H200 with 16 cores, 8 readers of 4 MiB take 28.5 GB/s from the page cache, and otherwise what
the disk has; a mapped file and one thread take 8.0 and 2.2.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from asyncllm.models.loading.checkpoint import DTYPES
from asyncllm.models.quant.place import Sliced

#: Of offsets, sizes and memory, for reading past the page cache.
ALIGNMENT = 4096


class BlockFile:
    """An open file that any number of threads read.

    Args:
        direct: past the page cache, except for what is in it; where the file system cannot, through
            it.
    """

    def __init__(self, file: Path, direct: bool):
        self._file = os.open(file, os.O_RDONLY)
        self._direct: int | None = None
        if direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):
                self._direct = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, offset: int, num_bytes: int, memory: Tensor) -> None:
        """Read into the beginning of memory, with the GIL released.

        Args:
            offset: a multiple of ``ALIGNMENT``.
            memory: uint8 on the host, of at least ``num_bytes`` rounded up to ``ALIGNMENT``, and
                aligned to it for reading past the page cache.

        Raises:
            OSError: the file ends earlier, or cannot be read.
        """
        view = memory.numpy().data
        done = 0 if self._direct is None else self._read_direct(offset, num_bytes, view)
        while done < num_bytes:
            count = os.preadv(self._file, [view[done:num_bytes]], offset + done)
            if count == 0:
                raise OSError("a file of weights ends before its tensors do")
            done += count

    def _read_direct(self, offset: int, num_bytes: int, view: memoryview) -> int:
        """Read what is in the page cache, then past it, as far as that works; returns how far."""
        assert self._direct is not None
        done = 0
        with suppress(OSError):  # nothing is there, or the file system cannot tell
            done = os.preadv(self._file, [view[:num_bytes]], offset, os.RWF_NOWAIT)
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with suppress(OSError):  # an alignment does not suffice
            while done < num_bytes:
                done = done // ALIGNMENT * ALIGNMENT
                count = os.preadv(self._direct, [view[done:rounded]], offset + done)
                done += count
                if count < ALIGNMENT:
                    break  # the end of the file
        return done


#: Contiguous places on the device of a tensor, or of some of its rows.
Target = Tensor | Sliced


class Reading(NamedTuple):
    """How files are read.

    Attributes:
        readers: threads.
        block_bytes: read at once; a multiple of ``ALIGNMENT``.
        direct: past the page cache, except for what is there already. A file then is as slow the
            next time.
    """

    readers: int = 8
    block_bytes: int = 4 << 20
    direct: bool = False


#: The best of 4 to 32 readers of 4 to 32 MiB, through the page cache and past it.
READING = Reading()


class Part(NamedTuple):
    """A part of a tensor that is in a block.

    Attributes:
        first, num_bytes: in the block.
        dtype: in the file.
        place: [elements] on the device.
    """

    first: int
    num_bytes: int
    dtype: torch.dtype
    place: Tensor


class Block(NamedTuple):
    """Bytes that are read at once, from ``offset`` on, a multiple of ``ALIGNMENT``."""

    offset: int
    num_bytes: int
    parts: list[Part]


#: Fills memory, uint8 [bytes of a block], in another thread.
Fill = Callable[[Tensor], object]


class WeightStream:
    """Copies tensors to contiguous places on a device; owns its threads and buffers."""

    def __init__(self, device: torch.device, reading: Reading = READING) -> None:
        self._reading = reading
        # One third is uploaded, one is being read, and one waits for readers to go on.
        sizes = 3 * reading.readers, reading.block_bytes
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(*sizes, dtype=torch.uint8, pin_memory=on_gpu)
        self._sent = [torch.cuda.Event() if on_gpu else None for _ in self._memory]
        self._turn = 0
        self._readers = ThreadPoolExecutor(reading.readers, "asyncllm-weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)

    def copy(self, file: Path, places: Mapping[str, Target]) -> Iterator[int]:
        """Copy tensors of a safetensors file to their places by name, and convert their dtypes.

        Reads only the rows that have a place.

        Yields the bytes of each upload; copies are done when the current stream is.
        """
        with BlockFile(file, self._reading.direct) as source:
            yield from self._copy(
                (block, partial(source.read, block.offset, block.num_bytes))
                for block in blocks_of(file, places, self._reading.block_bytes)
            )

    def copy_mapped(
        self, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]
    ) -> Iterator[int]:
        """As ``copy``, from contiguous tensors in host memory, which may be mapped."""
        return self._copy(self._mapped(tensors, places))

    def _mapped(
        self, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]
    ) -> Iterator[tuple[Block, Fill]]:
        for name, tensor in tensors.items():
            memory = tensor.view(-1).view(torch.uint8)
            whole = _Segment(0, memory.nbytes, tensor.dtype, places[name])
            for block in _cut([whole], self._reading.block_bytes):
                yield block, partial(_fill, memory[block.offset : block.offset + block.num_bytes])

    def _copy(self, blocks: Iterator[tuple[Block, Fill]]) -> Iterator[int]:
        reads: deque[tuple[int, Block, Future[object]]] = deque()
        try:
            for block, fill in blocks:
                if len(reads) == 2 * self._reading.readers:
                    yield self._send(*reads.popleft())
                turn = self._turn = (self._turn + 1) % len(self._sent)
                if (sent := self._sent[turn]) is not None:
                    sent.synchronize()  # at once, if it was never recorded
                reads.append((turn, block, self._readers.submit(fill, self._memory[turn])))
            while reads:
                yield self._send(*reads.popleft())
        finally:
            for *_, read in reads:  # after an error: nobody may read from a closed file
                if not read.cancel():
                    read.exception()

    def _send(self, turn: int, block: Block, read: Future[object]) -> int:
        """Wait until a block is read, and queue the upload of its tensors."""
        read.result()
        for first, num_bytes, dtype, place in block.parts:
            # As bytes, which may begin anywhere.
            values = self._memory[turn, first : first + num_bytes]
            if dtype == place.dtype:
                place.view(torch.uint8).copy_(values, non_blocking=True)
            else:  # converted on the device
                raw = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
                place.copy_(raw.copy_(values, non_blocking=True).view(dtype))
        if (sent := self._sent[turn]) is not None:
            sent.record()
        return sum(part.num_bytes for part in block.parts)


class _Segment(NamedTuple):
    """A tensor between two offsets."""

    begin: int
    end: int
    dtype: torch.dtype
    place: Tensor


def blocks_of(file: Path, places: Mapping[str, Target], block_bytes: int) -> Iterator[Block]:
    """The blocks of a safetensors file that hold rows with a place, in file order."""
    with open(file, "rb") as raw:
        header_bytes = int.from_bytes(raw.read(8), "little")
        header = msgspec.json.decode(raw.read(header_bytes))
    segments = []
    for name, target in places.items():
        begin, end = (8 + header_bytes + at for at in header[name]["data_offsets"])
        dtype = DTYPES[header[name]["dtype"]]
        if isinstance(target, Tensor):
            segments.append(_Segment(begin, end, dtype, target))
            continue
        row_bytes = (end - begin) // target.shape[0]
        for part in target.slices:
            rows = begin + part.start * row_bytes, begin + part.stop * row_bytes
            assert part.dim == 0
            assert isinstance(part.place, Tensor)
            segments.append(_Segment(*rows, dtype, part.place))
    return _cut(sorted(segments, key=lambda segment: segment.begin), block_bytes)


def _cut(segments: list[_Segment], block_bytes: int) -> Iterator[Block]:
    """Blocks of segments that are in the order of the file; a gap between two ends a block."""
    start, end, parts = 0, 0, list[Part]()
    for segment in segments:
        at, flat = segment.begin, segment.place.view(-1)
        size = segment.dtype.itemsize
        while at < segment.end:
            fits = start <= at <= min(end + ALIGNMENT, start + block_bytes - size)
            if not parts or not fits:
                if parts:
                    yield Block(start, end - start, parts)
                start, parts = at // ALIGNMENT * ALIGNMENT, []
            # Whole elements.
            count = (min(start + block_bytes, segment.end) - at) // size * size
            first = (at - segment.begin) // size
            place = flat[first : first + count // size]
            parts.append(Part(at - start, count, segment.dtype, place))
            at += count
            end = at
    if parts:
        yield Block(start, end - start, parts)


def _fill(source: Tensor, memory: Tensor) -> None:
    """Fill memory in another thread, where PyTorch cannot write to inference tensors."""
    memory.numpy()[: len(source)] = source.numpy()
