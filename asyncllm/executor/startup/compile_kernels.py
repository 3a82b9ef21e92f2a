"""``python -m asyncllm.executor.startup.compile_kernels``: the process that compiles kernels.

It imports what compilers need, reads a ``CompileJob`` from its standard input, and writes
``CompileReport``s, one a line, the last of which has ``done`` or ``error``. It uses no GPU. Threads
and libraries' thread pools would be lost when compilers are forked, so none is running then.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import as_completed
from importlib import import_module
from pathlib import Path

import msgspec

from asyncllm.errors import AsyncLLMError
from asyncllm.executor.startup.compile_job import CompileJob, CompileReport
from asyncllm.executor.startup.lean_torch import import_lean_torch
from asyncllm.system.child_process import die_with


def main(parent: int) -> int:
    """Do one job, as a child of that process; returns an exit code."""
    die_with(parent)
    gc.disable()  # what is imported is there to stay; compilers turn collections on again
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever compilers print is not for the parent

    def send(report: CompileReport) -> None:
        print(msgspec.json.encode(report).decode(), file=output)

    try:
        import_compiler()
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
        count = compile_kernels(job, lambda ready: send(CompileReport(ready)))
    except Exception as error:  # compilers and the steps of a model raise various types
        text = error.message if isinstance(error, AsyncLLMError) else _summary(error)
        send(CompileReport(error=text))
        return 1
    send(CompileReport(count, done=True))
    return 0


def import_compiler() -> None:
    """Import and compute what compilers inherit when they are forked."""
    from triton.runtime.cache import triton_key

    # A hash of half a gigabyte, without the GIL.
    hashing = threading.Thread(target=triton_key, name="asyncllm-triton-key")
    hashing.start()
    import_lean_torch()

    from asyncllm.kernels import triton as kernels

    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    import_module("asyncllm.executor.startup.kernel_discovery")
    hashing.join()


def compile_kernels(job: CompileJob, progress: Callable[[int], None]) -> int:
    """Compile all kernels of a job that the cache lacks, and record that it is done.

    After ``import_compiler``. A kernel is compiled as soon as it is found to be needed.

    Returns:
        The number of kernels.

    Raises:
        ModelError: the model is not supported, or not with this configuration.
        KernelError: a kernel cannot be compiled.
    """
    import torch

    from asyncllm.executor.startup.compiler_pool import compiler_pool
    from asyncllm.executor.startup.kernel_discovery import find_variants
    from asyncllm.executor.startup.triton_prebuild import Variant
    from asyncllm.kernels.support import MIN_CAPABILITY
    from asyncllm.models.served_spec import served_spec

    gpu = job.gpu
    if gpu.capability < MIN_CAPABILITY:
        job.record([])
        return 0
    spec = served_spec(Path(job.folder), job.config)
    with compiler_pool(gpu, Path(job.cache)) as pool:
        futures = []

        def found(variant: Variant) -> None:
            futures.append(pool.submit(variant))

        find_variants(spec, getattr(torch, job.dtype), job.config, gpu, found)
        pool.check()
        entries = []
        for future in as_completed(futures):
            entries.append(future.result())
            progress(len(entries))
    job.record(entries)
    return len(entries)


def _summary(error: Exception) -> str:
    """One line, as a compiler prints thousands."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
