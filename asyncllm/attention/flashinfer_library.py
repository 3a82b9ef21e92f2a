"""FlashInfer's compiled libraries: which ones a model needs, and whether they are built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from asyncllm.kernels.types import AttentionSpec


@dataclass(frozen=True, slots=True)
class Library:
    """The prefill kernels for one dtype and head size; window and soft cap are compiled in."""

    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        options = [name for name in ("window", "softcap") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join(["prefill", dtype, f"head_dim={self.head_dim}", *options])

    def jit_spec(self) -> Any:
        """FlashInfer's description: name, sources and paths."""
        from flashinfer.jit import gen_batch_prefill_module

        dtypes = (self.dtype, self.dtype, self.dtype, torch.int32)  # q, K/V, output, indices
        no_rotation = 0
        options = (self.head_dim, self.head_dim, no_rotation, self.window, self.softcap)
        half_precision_scores = False
        return gen_batch_prefill_module("fa2", *dtypes, *options, half_precision_scores)

    def is_built(self) -> bool:
        """Whether FlashInfer loads it without compiling."""
        built: bool = self.jit_spec().is_aot
        return built


def libraries_for(specs: Iterable[AttentionSpec], dtype: torch.dtype) -> list[Library]:
    """The libraries that attention in these layers loads."""
    libraries = [
        Library(dtype, spec.head_dim, spec.window is not None, spec.softcap is not None)
        for spec in specs
    ]
    return list(dict.fromkeys(libraries))


def installed() -> bool:
    """Whether FlashInfer can be imported; does not import it."""
    return find_spec("flashinfer") is not None


def find_nvcc() -> Path | None:
    """CUDA's compiler, found as FlashInfer finds it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        on_path = shutil.which("nvcc")
        if on_path is not None:
            return Path(on_path)
        home = "/usr/local/cuda"
    nvcc = Path(home, "bin", "nvcc")
    return nvcc if nvcc.exists() else None
