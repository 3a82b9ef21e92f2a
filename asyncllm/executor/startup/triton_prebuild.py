"""Record the launches of Triton's kernels instead of running them, to compile them ahead of time.

Triton compiles a kernel at its first launch, once for each combination of argument types,
alignments and constants, and keeps the result in a cache folder. To fill that folder without a GPU,
the serving program runs on the meta device under ``recorded_launches``; ``compiler_pool`` then
compiles the recorded variants for any GPU. So they have the same keys in the cache as those of the
serving program.

Use a process of its own for each GPU: Triton, torch and the kernels' launchers remember the
properties of the pretended device, and a variant launched before would really be launched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from asyncllm.errors import KernelError
from asyncllm.executor.startup.lean_torch import add_missing_meta
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
        source: the class of its source; Gluon functions have another one than Triton's.
        signature, constants, attributes: as the function's ``ASTSource`` takes them.
        options: of the backend, such as the number of warps.
    """

    function: Any
    source: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions, which cannot be pickled, go by their names."""
        function = self.function.fn
        parts = self.source, self.signature, self.constants, self.attributes, self.options
        return _named_variant, (function.__module__, function.__name__, *parts)


def _named_variant(module: str, name: str, *parts: Any) -> Variant:
    return Variant(getattr(import_module(module), name), *parts)


@contextmanager
def recorded_launches(
    gpu: Gpu, found: Callable[[Variant], object] | None = None
) -> Iterator[list[Variant]]:
    """Record kernel launches instead of running them; meta tensors pass for tensors on this GPU.

    No kernel may have been launched in this process, nor recorded for another GPU.

    Args:
        found: called with each variant at its first launch.

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
                function.ASTSource,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                {name: _as_tuples(value) for name, value in options.items()},
            )
            listed.append(variants[function, key])
            if found is not None:
                found(variants[function, key])
        return True  # do not compile or launch it

    with (
        pretended(gpu),
        replaced(driver, "_active", _AbsentGpu(gpu)),
        replaced(knobs.runtime, "jit_cache_hook", record),
        _MetaAsCuda(),
        torch.inference_mode(),
    ):
        yield listed


class _OnGpu(Tensor):
    """A meta tensor that passes for one on a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


class _MetaAsCuda(TorchFunctionMode):
    """Every function returns ``_OnGpu`` for meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return _on_gpu(func(*args, **(kwargs or {})))
        except Exception:  # nothing has run yet; functions without a kernel raise various types
            if not add_missing_meta():
                raise
            return _on_gpu(func(*args, **(kwargs or {})))


def _on_gpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_meta = type(value) is Tensor and value.device.type == "meta"
        return value.as_subclass(_OnGpu) if is_meta else value
    return tree_map(_on_gpu, value) if isinstance(value, tuple | list) else value


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
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value, for a while."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _as_tuples(value: Any) -> Any:
    """JSON has turned tuples into lists."""
    return tuple(_as_tuples(part) for part in value) if isinstance(value, list) else value
