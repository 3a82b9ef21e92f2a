"""Read the beginning of a checkpoint into the page cache, while Python imports modules."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

#: About what a disk reads meanwhile. A GPU's loader takes what is in the page cache and reads past
#: it otherwise: more might be read twice.
MOST_BYTES: Final = 2 << 30


def read_ahead(folder: Path) -> None:
    """Begin, on Linux, and return at once; without such files, nothing happens."""
    if sys.platform != "linux":
        return
    name = "asyncllm-read-ahead"
    threading.Thread(target=read_weights, args=(folder,), name=name, daemon=True).start()


def read_weights(folder: Path, most: int = MOST_BYTES) -> int:
    """Read a folder's weights, in the order of the loader; returns the number of bytes.

    Args:
        most: bytes.
    """
    single, done = folder / "model.safetensors", 0
    files = [single] if single.is_file() else sorted(folder.glob("model-*.safetensors"))
    with suppress(OSError), open(os.devnull, "wb", buffering=0) as nowhere:
        for path in files:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                # The pages are not copied, and the GIL is released.
                while count := os.sendfile(nowhere.fileno(), file.fileno(), None, most - done):
                    done += count
    return done
