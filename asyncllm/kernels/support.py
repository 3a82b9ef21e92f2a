"""Where our Triton kernels run: decided once for each GPU, for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property, partial, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from asyncllm.kernels.gpu import dotted, gpu_of
from asyncllm.kernels.tuning import is_tuned

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Ampere, the first whose tensor cores take bfloat16 and whose copies are asynchronous.
MIN_CAPABILITY = (8, 0)


class Operation(Generic[P, R]):
    """A function with two versions: in Triton on GPUs with our kernels, elsewhere in plain torch.

    The device of its first argument, a tensor, decides.

    Attributes:
        reference: the one in plain torch, which tests compare the kernels with.
    """

    def __init__(self, module: str, reference: Callable[P, R]):
        self.reference = reference
        self._module = module
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x: Any = args[0]
        run = self._launch if has_triton_kernels(x) else self.reference
        return run(*args, **kwargs)

    @cached_property
    def _launch(self) -> Callable[P, R]:
        module = import_module(f"asyncllm.kernels.triton.{self._module}")
        launch: Callable[P, R] = getattr(module, self.reference.__name__)
        return launch


def in_triton(module: str) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorates a function in plain torch: ``module`` of ``kernels.triton`` has it by this name."""
    return partial(Operation, module)


def has_triton_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU that our kernels run on; otherwise plain torch handles it."""
    return x.is_cuda and obstacle(x.device) is None


def obstacle(device: torch.device) -> str | None:
    """Why our kernels do not run on this CUDA device, on one line; None if they do.

    The first call launches a kernel and waits for it, so it must not be captured in a CUDA graph.
    """
    return _obstacle(device, gpu_of(device).capability)


def say_what_runs(device: torch.device) -> None:
    """Log one line if this CUDA device does not run what was measured and tuned."""
    gpu, reason = gpu_of(device), obstacle(device)
    if reason is not None:
        log.warning(
            "%s: all steps run on PyTorch's kernels, which is slow: Triton's do not run here: %s",
            gpu,
            reason,
        )
    elif not gpu.is_hopper:
        log.info(
            "%s: runs on the kernels for every GPU since Ampere, which were measured and tuned on "
            "an H200 only",
            gpu,
        )
    elif not is_tuned(gpu.name):
        log.info("%s: runs on the kernels for Hopper, which were tuned on an H200 only", gpu)


@cache
def _obstacle(device: torch.device, capability: tuple[int, int]) -> str | None:
    if capability < MIN_CAPABILITY:
        needed, has = dotted(MIN_CAPABILITY), dotted(capability)
        return f"they need compute capability {needed}, and this GPU has {has}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from asyncllm.kernels.triton.probe import probe

        probe(device)
    except Exception as error:  # imports, compiler, loader and driver raise various types
        first, *_ = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {first}"
    return None
