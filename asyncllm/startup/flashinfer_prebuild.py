"""FlashInfer's compiled modules: which ones a model needs, and building them ahead of time.

FlashInfer compiles a shared library per kernel, dtype and head size when it is first used, which
takes minutes and needs nvcc. Libraries built here lie where FlashInfer looks before it compiles
anything (its package's ``data/aot``), so that serving needs no compiler. No GPU is needed to build.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncllm.errors import AsyncLLMError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncllm.kernels.types import AttentionSpec

#: FlashInfer reads its targets from here, once, when it is imported.
_TARGETS = "FLASHINFER_CUDA_ARCH_LIST"


Kind = Literal["prefill"]
KINDS: tuple[Kind, ...] = ("prefill",)


class KernelError(AsyncLLMError):
    """Kernels cannot be built here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class KernelModule:
    """One of FlashInfer's libraries; a window and a soft cap are compiled in."""

    kind: Kind
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        options = [name for name in ("window", "softcap") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join([self.kind, dtype, f"head_dim={self.head_dim}", *options])

    def jit_spec(self) -> Any:
        """FlashInfer's description of the library: its name, sources and places."""
        from flashinfer.jit import gen_batch_prefill_module

        dtypes = (self.dtype, self.dtype, self.dtype, torch.int32)  # q, K/V, output, indices
        no_rotation = 0
        options = (self.head_dim, self.head_dim, no_rotation, self.window, self.softcap)
        half_precision_scores = False
        return gen_batch_prefill_module("fa2", *dtypes, *options, half_precision_scores)

    def is_built(self) -> bool:
        """Whether FlashInfer loads it without compiling anything."""
        built: bool = self.jit_spec().is_aot
        return built


@dataclass(frozen=True, slots=True)
class Built:
    """A library in its place; ``seconds`` is None if it lay there already."""

    name: str
    path: Path
    size: int
    seconds: float | None


def modules_for(specs: Iterable[AttentionSpec], dtype: torch.dtype) -> list[KernelModule]:
    """The libraries that attention of these layers loads, each once."""
    modules = [
        KernelModule(
            "prefill", dtype, spec.head_dim, spec.window is not None, spec.softcap is not None
        )
        for spec in specs
    ]
    return list(dict.fromkeys(modules))


def installed() -> bool:
    """Whether FlashInfer can be imported; does not import it."""
    return find_spec("flashinfer") is not None


def find_nvcc() -> Path | None:
    """CUDA's compiler, looked for where FlashInfer does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        on_path = shutil.which("nvcc")
        if on_path is not None:
            return Path(on_path)
        home = "/usr/local/cuda"
    nvcc = Path(home, "bin", "nvcc")
    return nvcc if nvcc.exists() else None


def prepare(archs: Sequence[str]) -> None:
    """Check that kernels can be compiled here, and say what for.

    FlashInfer reads that once, so this comes before it is first imported in this process.

    Args:
        archs: compute capabilities such as "8.0" or "9.0a"; none: the GPUs of this machine.

    Raises:
        KernelError: FlashInfer, a compiler or a target is missing, or a target is no compute
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
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?", arch):
            raise KernelError(f"{arch!r} is no compute capability such as 8.0 or 9.0a")
    if archs:
        assert "flashinfer" not in sys.modules, "FlashInfer has read its targets already"
        os.environ[_TARGETS] = " ".join(archs)
    elif _TARGETS not in os.environ and not torch.cuda.is_available():
        raise KernelError("there is no GPU here to build for: name one, as in --arch 9.0a")


def build(module: KernelModule, *, force: bool = False) -> Built:
    """Compile a library and put it where FlashInfer loads it without compiling.

    Args:
        force: build it even if it is there; a library does not tell what it was built for.

    Raises:
        KernelError: the compiler fails, or the library cannot be written.
    """
    spec = module.jit_spec()
    path: Path = spec.aot_path
    if path.exists() and not force:
        return Built(spec.name, path, path.stat().st_size, None)
    started = time.perf_counter()
    try:
        spec.build(verbose=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that starts meanwhile must see a whole library or none.
        partial = path.with_suffix(f".{os.getpid()}")
        shutil.copyfile(spec.jit_library_path, partial)
        partial.replace(path)
    except (RuntimeError, OSError) as error:
        raise KernelError(f"building {spec.name} failed: {error}") from error
    return Built(spec.name, path, path.stat().st_size, time.perf_counter() - started)
