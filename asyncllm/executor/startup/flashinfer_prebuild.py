"""Build FlashInfer's libraries ahead of time; needs nvcc, but no GPU.

FlashInfer compiles a library when it is first used, which takes minutes. Libraries built here lie
in its package's ``data/aot``, where FlashInfer looks first, so that serving needs no compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from asyncllm.attention.flashinfer.library import Capability, Library, find_nvcc, installed
from asyncllm.errors import KernelError
from asyncllm.kernels.gpu import gpu_of

#: FlashInfer reads its targets from here, once, when it is imported.
_TARGETS = "FLASHINFER_CUDA_ARCH_LIST"


class Built(NamedTuple):
    """A library's file; ``seconds`` is None if it was already there."""

    path: Path
    size: int
    seconds: float | None


def prepare(archs: Sequence[str]) -> list[Capability]:
    """Check that libraries can be compiled here, and set the targets.

    Must come before FlashInfer is first imported in this process.

    Args:
        archs: compute capabilities such as "8.0" or "9.0a"; none: the GPUs of this machine.

    Returns:
        The targets.

    Raises:
        KernelError: FlashInfer, a compiler or a target is missing, or a target is not a compute
            capability.
    """
    if not installed():
        raise KernelError("FlashInfer is not installed: pip install -e '.[cuda]' in the checkout")
    if find_nvcc() is None:
        raise KernelError(
            "nvcc is missing: install the CUDA toolkit and put its bin folder on PATH, or set "
            "CUDA_HOME to where it lies"
        )
    if shutil.which("ninja") is None:
        raise KernelError("ninja is missing: pip install ninja, or install ninja-build")
    if not archs:
        archs = os.environ.get(_TARGETS, "").split()
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?", arch):
            raise KernelError(f"{arch!r} is no compute capability such as 8.0 or 9.0a")
    if archs:
        assert "flashinfer" not in sys.modules, "FlashInfer has read its targets already"
        os.environ[_TARGETS] = " ".join(archs)
        pairs = (arch.rstrip("af").split(".") for arch in archs)
        return [(int(major), int(minor)) for major, minor in pairs]
    if not torch.cuda.is_available():
        raise KernelError("there is no GPU here to build for: name one, as in --arch 9.0a")
    return [gpu_of(i).capability for i in range(torch.cuda.device_count())]


def build(library: Library, *, force: bool = False) -> Built:
    """Compile a library and put it where FlashInfer loads it without compiling.

    Args:
        force: build it even if it is there; a library's file does not show its targets.

    Raises:
        KernelError: the compiler fails, or the library cannot be written.
    """
    spec = library.jit_spec()
    path: Path = spec.aot_path
    if path.exists() and not force:
        return Built(path, path.stat().st_size, None)
    started = time.perf_counter()
    try:
        spec.build(verbose=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process must find a whole library or none.
        partial = path.with_suffix(f".{os.getpid()}")
        shutil.copyfile(spec.jit_library_path, partial)
        partial.replace(path)
    except (RuntimeError, OSError) as error:
        raise KernelError(f"building {spec.name} failed: {error}") from error
    return Built(path, path.stat().st_size, time.perf_counter() - started)
