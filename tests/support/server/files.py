"""As many files as a test allows."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def limited(files: int) -> Iterator[None]:
    """This process can have so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def only(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    with open(os.devnull, "rb") as lowest:
        first_free = lowest.fileno()
    with limited(first_free + count):
        yield
