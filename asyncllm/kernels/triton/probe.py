"""A tiny kernel that shows whether Triton can compile and launch here."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What the functions of ``kernels`` import later, so that what a version of Triton lacks shows now.
import asyncllm.kernels.triton.attention.decode
import asyncllm.kernels.triton.attention.prefill
import asyncllm.kernels.triton.gemm.linear  # noqa: F401
from asyncllm.kernels.triton.launch import Launcher

LANES = 32


@triton.jit
def _probe(x, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1.0)


_launch = Launcher(_probe)


def probe(device: torch.device) -> None:
    """Launch a kernel twice: compiled for the first launch, and found again for the second.

    Raises:
        Exception: from compiler, loader or driver.
        RuntimeError: the kernel's result is wrong.
    """
    x = torch.zeros(LANES, device=device)
    for _ in range(2):
        _launch((1, 1, 1), (x,), (LANES,), num_warps=1)
    # The meta device is used where launches are only recorded.
    if device.type != "meta" and not bool((x == 2).all()):
        raise RuntimeError("a kernel of Triton's gave a wrong result")
