"""CUDA graphs: capturing one, and results that do not keep their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


@contextmanager
def capturing(pool: Any, device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block launches on the current stream; it executes nothing.

    Args:
        pool: of ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    # Relaxed: other threads may do what they like meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="relaxed")
    try:
        yield graph
    finally:
        end_capture(graph, pool, device)


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
    """End a capture, also for PyTorch's allocator.

    Raises:
        RuntimeError: the capture is invalid. PyTorch then believes that it goes on: it would refuse
            to capture into the pool again, and to return memory.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):  # the allocator knows: what failed came later
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


class _Memory:
    """Device memory for ``torch.as_tensor``, which does not own it."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """A view of contiguous memory that does not keep the memory allocated.

    All graphs share one pool. What a graph's tensors do not keep, other graphs use for themselves,
    so results of one replay last until the next.
    """
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
