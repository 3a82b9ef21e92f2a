"""Load CUDA's libraries and create its context in a thread, while Python imports modules.

Importing torch loads its libraries one by one, and the first tensor on a GPU creates the context.
Neither needs the GIL: on an H200, the first tensor is there after 2.5 s instead of 3.0 s.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from asyncllm.kernels.cuda_driver import load_driver


def preload_cuda(gpu: int = 0) -> None:
    """Start it, and return at once; without such a GPU, or without torch, nothing happens."""
    threading.Thread(target=_preload, args=(gpu,), name="asyncllm-preload", daemon=True).start()


def _preload(gpu: int) -> None:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    library = Path(spec.submodule_search_locations[0], "lib", "libtorch_cuda.so")
    cuda = load_driver()
    if cuda is None or not library.exists():
        return
    # A foreign function releases the GIL; loading with ctypes.CDLL would not.
    ctypes.CDLL(None).dlopen(os.fsencode(library), os.RTLD_LAZY)
    # The primary context, which torch uses too.
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), gpu)
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of half a gigabyte, which the first kernel would wait for
