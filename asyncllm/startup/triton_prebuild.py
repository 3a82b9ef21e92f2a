"""Compile Triton's kernels ahead of time: record the launches of a program, then compile them.

Triton compiles a kernel at its first launch, once for each combination of argument types,
alignments and constants, and keeps the result in a cache folder. To fill that folder without a GPU,
the serving program runs on the meta device under ``recorded_launches``, which records launches
instead of running them; the recorded variants are then compiled for any GPU. So they have the same
keys in the cache as those of the serving program.

Use a process of its own for each GPU: Triton, torch and the kernels' launchers remember the
properties of the pretended device, and a variant launched before would really be launched.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from asyncllm.errors import KernelError
from asyncllm.kernels.gpu import Gpu, dotted, gpu_of, pretended

#: The most likely GPU of each compute capability. What is built for one serves all of the same
#: capability, except those whose projections were measured and tuned.
USUAL_GPUS = (
    Gpu((8, 0), "NVIDIA A100-SXM4-80GB", 108),
    Gpu((8, 6), "NVIDIA A10", 72),
    Gpu((8, 9), "NVIDIA L4", 58),
    Gpu((9, 0), "NVIDIA H200", 132),
    Gpu((10, 0), "NVIDIA B200", 148),
    Gpu((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188),
)


def gpus_of(archs: Sequence[str]) -> list[Gpu]:
    """The GPUs to compile for.

    Args:
        archs: compute capabilities such as "9.0a"; none: the GPUs of this machine.

    Raises:
        KernelError: there is no GPU here, or a capability is not one of ``USUAL_GPUS``.
    """
    if not archs:
        return _gpus_here()
    known = {dotted(gpu.capability): gpu for gpu in USUAL_GPUS}
    unknown = [arch for arch in archs if arch.rstrip("af") not in known]
    if unknown:
        raise KernelError(
            f"Triton's kernels can be built for {', '.join(known)} or the GPUs of this machine, "
            f"not for {', '.join(unknown)}"
        )
    return [known[arch.rstrip("af")] for arch in archs]


def _gpus_here() -> list[Gpu]:
    if not torch.cuda.is_available():
        raise KernelError("there is no GPU here to build for: name one, as in --arch 9.0a")
    return list(dict.fromkeys(map(gpu_of, range(torch.cuda.device_count()))))


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile.

    Attributes:
        function: the ``triton.jit`` function.
        signature, constants, attributes: as the function's ``ASTSource`` takes them.
        options: of the backend, such as the number of warps.
    """

    function: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]


@contextmanager
def recorded_launches(gpu: Gpu) -> Iterator[list[Variant]]:
    """Record kernel launches instead of running them; meta tensors pass for tensors on this GPU.

    No kernel may have been launched in this process, nor recorded for another GPU.

    Yields:
        The launched variants, each once.
    """
    from triton import knobs
    from triton.runtime import driver

    assert driver._default is None, "this process has used its GPU"
    variants: dict[Any, Variant] = {}
    listed: list[Variant] = []

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function, key = fn.jit_function, compile["key"]
        if (function, key) not in variants:
            options = json.loads(compile["specialization_data"])["options"]
            variants[function, key] = Variant(
                function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                {name: _as_tuples(value) for name, value in options.items()},
            )
            listed.append(variants[function, key])
        return True  # do not compile or launch it

    with (
        pretended(gpu),
        _replaced(driver, "_active", _AbsentGpu(gpu)),
        _replaced(knobs.runtime, "jit_cache_hook", record),
        _MetaAsCuda(),
        torch.inference_mode(),
    ):
        yield listed


def compile_all(variants: Sequence[Variant], gpu: Gpu, folder: Path) -> None:
    """Compile the variants that a cache folder lacks, on all cores.

    Keeps only what launching needs. Before 3.7, Triton links each kernel with its own launcher in
    C, which is compiled too; so serving needs no compiler.

    Raises:
        KernelError: a C compiler is missing, or a kernel cannot be compiled for this GPU.
    """
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler import compile as compile_kernel
    from triton.errors import TritonError

    def build(variant: Variant) -> None:
        function = variant.function
        # Gluon functions have another kind of source than Triton's.
        source = function.ASTSource(
            function, variant.signature, variant.constants, variant.attributes
        )
        try:
            kernel = compile_kernel(source, target=gpu.target, options=variant.options)
        except (RuntimeError, TritonError) as error:
            raise KernelError(f"{function.__name__} for {gpu.name}: {error}") from error
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(source, kernel.metadata)

    with (
        _replaced(knobs.cache, "dir", str(folder.absolute())),
        _replaced(knobs.compilation, "store_binary_only", True),
        _linkable_driver(),
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        nvidia.CudaUtils()  # compiles Triton's own interface to the driver
        for _ in threads.map(build, variants):
            pass  # raises the first error


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


class _OnGpu(Tensor):
    """A meta tensor that passes for one on a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


class _MetaAsCuda(TorchFunctionMode):
    """Every function returns ``_OnGpu`` for meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(_on_gpu, func(*args, **(kwargs or {})))


def _on_gpu(value: Any) -> Any:
    if type(value) is Tensor and value.device.type == "meta":
        return value.as_subclass(_OnGpu)
    return value


class _AbsentGpu:
    """The part of Triton's driver that choosing a variant needs."""

    def __init__(self, gpu: Gpu):
        self._target = gpu.target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


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
            with _replaced(knobs.nvidia, "libcuda_path", folder):
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


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _as_tuples(value: Any) -> Any:
    """JSON has turned tuples into lists."""
    return tuple(_as_tuples(part) for part in value) if isinstance(value, list) else value
