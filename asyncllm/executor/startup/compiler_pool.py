"""Compiles Triton's kernels in several processes; needs no GPU.

Triton's compiler holds the GIL half of the time, so threads hardly help. The processes are forked,
as imports would take longer than most kernels; so nothing here must have started a thread or used a
GPU before.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncllm.errors import KernelError
from asyncllm.executor.startup.triton_prebuild import Variant, replaced
from asyncllm.kernels.gpu import Gpu
from asyncllm.system.child_process import die_with

#: A process takes some 200 MB, and models have some 75 kernels.
MAX_PROCESSES = 32


@contextmanager
def compiler_pool(gpu: Gpu, folder: Path) -> Iterator[CompilerPool]:
    """Processes that compile into a cache folder; on leaving, what has not begun is given up."""
    from triton import knobs

    with (
        replaced(knobs.cache, "dir", str(folder.absolute())),
        replaced(knobs.compilation, "store_binary_only", True),
        _linkable_driver(),
    ):
        pool = CompilerPool(gpu)
        try:
            yield pool
        finally:
            pool.shut_down()


class CompilerPool:
    """See ``compiler_pool``."""

    def __init__(self, gpu: Gpu) -> None:
        gc.freeze()  # so that collections in the processes do not copy all memory
        self._gpu = gpu
        self._processes = ProcessPoolExecutor(
            min(len(os.sched_getaffinity(0)), MAX_PROCESSES),
            multiprocessing.get_context("fork"),
            initializer=_enter_pool,
            initargs=(os.getpid(),),
        )
        # Forks all processes. Every kernel's launcher needs what this compiles.
        self._interface = self._processes.submit(_compile_interface)

    def submit(self, variant: Variant) -> Future[str]:
        """Compile a variant that the cache lacks; gives the name of its entry.

        Only what launching needs is kept. Before 3.7, Triton links each kernel with its own
        launcher in C, which is compiled too; so serving needs no compiler.

        Raises (in the future):
            KernelError: a C compiler is missing, or the kernel cannot be compiled for this GPU.
            BrokenProcessPool: a process died.
        """
        return self._processes.submit(_compile, variant, self._gpu)

    def check(self) -> None:
        """Wait until Triton's own interface is compiled.

        Raises:
            KernelError: a C compiler is missing or fails.
        """
        self._interface.result()

    def shut_down(self) -> None:
        self._processes.shutdown(wait=True, cancel_futures=True)


def _enter_pool(parent: int) -> None:
    die_with(parent)
    gc.enable()


def _compile_interface() -> None:
    from triton.backends.nvidia import driver as nvidia

    try:
        nvidia.CudaUtils()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise KernelError(f"Triton's interface to CUDA cannot be compiled: {error}") from error


def _compile(variant: Variant, gpu: Gpu) -> str:
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler import compile as compile_kernel
    from triton.errors import TritonError
    from triton.runtime.cache import get_cache_manager

    from asyncllm.kernels.triton.launch import hash_callees

    function = variant.function
    hash_callees(function)
    parts = variant.signature, variant.constants, variant.attributes
    source = variant.source(function, *parts)
    try:
        kernel = compile_kernel(source, target=gpu.target, options=variant.options)
    except (RuntimeError, TritonError) as error:
        raise KernelError(f"{function.__name__} for {gpu.name}: {error}") from error
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(source, kernel.metadata)
    return Path(get_cache_manager(kernel.hash).cache_dir).name


@contextmanager
def _linkable_driver() -> Iterator[None]:
    """Let Triton link with a stub if the driver's library is not here.

    The stub stays loaded, or what is linked with it could not be loaded.
    """
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError):
        with TemporaryDirectory() as folder:
            ctypes.CDLL(str(_make_stub(Path(folder), Path(nvidia.__file__).parent)))
            with replaced(knobs.nvidia, "libcuda_path", folder):
                yield
    else:
        yield


def _make_stub(folder: Path, backend: Path) -> Path:
    """A ``libcuda.so.1`` with the functions named by ``backend``'s sources; all return an error."""
    text = "".join((backend / name).read_text() for name in ("driver.c", "driver.py"))
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", text)))
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("\n".join(f"int {name}(void) {{ return 100; }}" for name in names))
    flags = ("-shared", "-fPIC", f"-Wl,-soname,{library.name}")
    subprocess.run([_c_compiler(), *flags, "-o", library, source], check=True)
    return library


def _c_compiler() -> str:
    """The compiler that Triton uses."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise KernelError("a C compiler is missing: install gcc, or set CC")
    return found
