"""Read blocks of a file into memory, through the page cache or past it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from torch import Tensor

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
