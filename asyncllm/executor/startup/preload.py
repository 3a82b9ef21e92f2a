"""Create a GPU's context and load CUDA's libraries in threads, while Python imports modules.

Importing torch loads its libraries, and the first tensor on a GPU creates the context. Neither
needs the GIL.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asyncllm.kernels.cuda_driver import load_driver

#: All that a server imports before torch and that has extension modules.
EXTENSIONS = (
    "aiohttp.web", "jinja2", "mmap", "numpy", "queue", "safetensors", "termios", "tokenizers",
    "uvloop",
)  # fmt: skip


def preload_cuda(gpu: int = 0) -> None:
    """Start both; without such a GPU, or without a torch for GPUs, nothing happens.

    Imports ``EXTENSIONS``. Linux loads one library at a time: an extension module that is imported
    while torch's libraries are loaded waits for them, with the GIL.
    """
    library = _torch_library()
    if library is None:
        return
    _in_thread(make_context, gpu)
    for name in EXTENSIONS:
        with suppress(ImportError):  # whoever needs it says so
            import_module(name)
    _in_thread(_load, library)


def make_context(gpu: int) -> None:
    """Create the GPU's primary context, which torch uses too; it lasts as long as the process.

    Whatever goes wrong, torch finds out again, and says so.
    """
    cuda = load_driver()
    device = ctypes.c_int()
    if cuda is not None and cuda.cuDeviceGet(ctypes.byref(device), gpu) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)


def _torch_library() -> Path | None:
    """The largest of torch's libraries, which loads the others; None in builds for CPUs."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    library = Path(spec.submodule_search_locations[0], "lib", "libtorch_cuda.so")
    return library if library.exists() else None


def _load(library: Path) -> None:
    if load_driver() is None:  # everything will run on the CPU
        return
    # A foreign function releases the GIL; loading with ctypes.CDLL would not.
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_LAZY)
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of half a gigabyte, which the first kernel would wait for


def _in_thread(function: Callable[..., object], *args: object) -> None:
    name = f"asyncllm-{function.__name__.strip('_')}"
    threading.Thread(target=function, args=args, name=name, daemon=True).start()


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
