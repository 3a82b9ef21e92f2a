"""FlashInfer's compiled libraries: which ones a model needs, and whether they are built."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from asyncllm.kernels.types import AttentionSpec

#: "decode": one query for each row, on CUDA cores. "fa2", "fa3": any number of queries, on tensor
#: cores, after FlashAttention 2 and 3.
Template = Literal["decode", "fa2", "fa3"]
#: The compute capability of a GPU, such as (9, 0).
Capability = tuple[int, int]

MIN_CAPABILITY: Capability = (8, 0)
HOPPER: Capability = (9, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
#: With this many query heads to a K/V head or fewer, tensor cores would mostly multiply padding. On
#: an H200, 128 rows of 768 tokens and groups of 2: 98 us on CUDA cores, 107 on tensor cores. With
#: groups of 4: 146 and 108.
CUDA_CORE_GROUP = 2


def unsupported(specs: Iterable[AttentionSpec], dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot attend in these layers in this dtype; None if it can."""
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    for spec in specs:
        if spec.head_dim not in HEAD_DIMS:
            return f"it has kernels for a head_dim of 64, 128 or 256, not {spec.head_dim}"
    return None


def decode_template(spec: AttentionSpec) -> Template:
    """The kernels for steps of decode rows only.

    Those on CUDA cores read all of a sequence, even if the window covers little of it.
    """
    return "decode" if spec.group <= CUDA_CORE_GROUP and spec.window is None else "fa2"


def prompt_template(
    spec: AttentionSpec, capability: Capability, of_cache: torch.dtype | None = None
) -> Template:
    """The kernels for rows of several tokens.

    FA3 needs Hopper's matmul instructions, and K and V in the dtype of the queries. Its tiles are
    tuned for heads of 128, and nvcc takes minutes for each head size.
    """
    is_fa3 = capability == HOPPER and spec.head_dim == 128 and of_cache is None
    return "fa3" if is_fa3 else "fa2"


def templates(
    spec: AttentionSpec, capability: Capability, of_cache: torch.dtype | None = None
) -> tuple[Template, ...]:
    """All kernels that this layer needs: decode rows of mixed steps are on FA2."""
    return decode_template(spec), "fa2", prompt_template(spec, capability, of_cache)


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels of one template for one dtype and head size.

    Whether there is a window and a soft cap is compiled in, but not their values. Layers with sinks
    need nothing else: see ``apply_sinks``. ``of_cache`` is the dtype of K and V, if another.
    """

    template: Template
    dtype: torch.dtype
    head_dim: int
    window: bool = False
    softcap: bool = False
    of_cache: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        template: Template,
        spec: AttentionSpec,
        dtype: torch.dtype,
        of_cache: torch.dtype | None = None,
    ) -> Library:
        """The one for a layer."""
        window, softcap = spec.window is not None, spec.softcap is not None
        return cls(template, dtype, spec.head_dim, window, softcap, of_cache)

    def __str__(self) -> str:
        options = [name for name in ("window", "softcap") if getattr(self, name)]
        options += [] if self.of_cache is None else ["fp8 cache"]
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join([self.template, dtype, f"head_dim={self.head_dim}", *options])

    def jit_spec(self) -> Any:
        """FlashInfer's description: name, sources and paths."""
        from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

        if self.template == "decode":
            return gen_batch_decode_module(*self._options())
        return gen_batch_prefill_module(self.template, *self._options(), _HALF_PRECISION_SCORES)

    def is_built(self) -> bool:
        """Whether FlashInfer loads it without compiling."""
        built: bool = self.jit_spec().is_aot
        return built

    def load(self) -> Any:
        """FlashInfer's functions: ``plan``, and ``run`` (decode) or ``paged_run`` (others).

        Compiles the library first if it is neither built nor cached.
        """
        from flashinfer.decode import get_batch_decode_module
        from flashinfer.prefill import get_batch_prefill_module

        if self.template == "decode":
            return get_batch_decode_module(*self._options())
        return get_batch_prefill_module(self.template, *self._options(), _HALF_PRECISION_SCORES)

    def _options(self) -> tuple[Any, ...]:
        # Of queries, K and V, results and indices.
        dtypes = self.dtype, self.of_cache or self.dtype, self.dtype, torch.int32
        no_rotation = 0
        return (*dtypes, self.head_dim, self.head_dim, no_rotation, self.window, self.softcap)


_HALF_PRECISION_SCORES = False


def libraries_for(
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    capability: Capability,
    of_cache: torch.dtype | None = None,
) -> list[Library]:
    """The libraries that attention in these layers loads on such a GPU."""
    libraries = [
        Library.of(template, spec, dtype, of_cache)
        for spec in specs
        for template in templates(spec, capability, of_cache)
    ]
    return list(dict.fromkeys(libraries))


def libraries_by_size(
    dtype: torch.dtype,
    head_dim: int,
    window: bool,
    softcap: bool,
    capabilities: Iterable[Capability],
) -> list[Library]:
    """Those of all models whose layers have this head size, on all such GPUs."""
    options = 1 if window else None, 1.0 if softcap else None
    specs = [
        AttentionSpec(0, group, 1, head_dim, 1.0, *options)
        for group in (CUDA_CORE_GROUP, CUDA_CORE_GROUP + 1)
    ]
    libraries = [
        library
        for capability in capabilities
        for library in libraries_for(specs, dtype, capability)
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
