"""stdin, stdout and stderr, whose other ends may be gone: that must not end a server."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


def open_standard_files() -> None:
    """Open those that were closed, or the next sockets would get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def announce(line: str) -> None:
    """Print a line, if anybody can read it."""
    try:
        print(line, flush=True)
    except OSError:
        _discard(sys.stdout)


def flush() -> None:
    """Write what has been printed, so that a process that is forked now does not print it again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except BrokenPipeError:
                _discard(stream)
            except OSError:  # such as a full disk; there may be room later
                pass


def _discard(stream: IO[str]) -> None:
    """Drop what cannot be written, now and later: Python would try again when it ends, and fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
