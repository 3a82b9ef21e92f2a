"""What a GPU is and has: the one place that asks, so that a GPU can also be pretended."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncllm.errors import KernelError

if TYPE_CHECKING:
    import torch

#: The environment variable that has every GPU treated as one of an older compute capability.
PRETEND = "ASYNCLLM_PRETEND_CAPABILITY"

#: KiB of shared memory that a program may have, by compute capability (CUDA's programming guide).
_SHARED_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, here or elsewhere.

    Attributes:
        capability: compute capability, such as (9, 0).
        name: by which tables of measured kernels know it.
        multiprocessors: their number.
    """

    capability: tuple[int, int]
    name: str
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name} (compute capability {dotted(self.capability)})"

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels for Hopper run: they use instructions of 9.0 alone."""
        return self.capability == (9, 0)

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch: a kernel can start before the previous one has ended."""
        return self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether tensor cores take e4m3, and instructions convert it."""
        return self.capability >= (8, 9)

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 is computed by instructions of its own."""
        return self.capability >= (8, 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a program may have; of unknown GPUs, the least of any since 8.0."""
        return _SHARED_KIB.get(self.capability, 99) << 10

    @property
    def target(self) -> Any:
        """Triton's name for it."""
        from triton.backends.compiler import GPUTarget

        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)


_pretended: ContextVar[Gpu | None] = ContextVar("pretended GPU", default=None)


def gpu_of(device: torch.device | int) -> Gpu:
    """The CUDA device, as kernels should treat it.

    Raises:
        KernelError: ``PRETEND`` is set to what this GPU cannot pass for.
    """
    return _pretended.get() or _found(device)


@contextmanager
def pretended(gpu: Gpu) -> Iterator[None]:
    """Every device of this thread is that GPU, which need not be here."""
    token = _pretended.set(gpu)
    try:
        yield
    finally:
        _pretended.reset(token)


@cache
def _found(device: torch.device | int) -> Gpu:
    import torch  # here, as this module also serves before torch is imported

    found = torch.cuda.get_device_properties(device)
    gpu = Gpu((found.major, found.minor), found.name, found.multi_processor_count)
    return older(gpu, os.environ[PRETEND]) if os.environ.get(PRETEND) else gpu


def older(gpu: Gpu, capability: str) -> Gpu:
    """This GPU as one of an older compute capability, such as "8.0".

    Tables of measured kernels do not know its name.

    Raises:
        KernelError: that is none, or a newer one.
    """
    if not re.fullmatch(r"\d+\.\d", capability):
        raise KernelError(f"{PRETEND}: {capability!r} is no compute capability such as 8.0")
    major, _, minor = capability.partition(".")
    wanted = int(major), int(minor)
    if wanted == gpu.capability:
        return gpu
    if wanted > gpu.capability:
        raise KernelError(f"{PRETEND}: {gpu} cannot pass for one of {capability}")
    return replace(gpu, capability=wanted, name=f"{gpu.name} as {capability}")


def dotted(capability: tuple[int, int]) -> str:
    """As people write it: "8.0"."""
    return "{}.{}".format(*capability)
