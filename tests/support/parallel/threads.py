"""Ranks as threads of one process, joined as processes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore

from asyncllm.parallel.group import join
from asyncllm.parallel.ranks import Ranks

T = TypeVar("T")

_CPU = torch.device("cpu")


def run_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What ``work`` returns on each rank."""
    store = HashStore()

    def run(rank: int) -> T:
        # inference_mode and no_grad belong to a thread.
        with torch.inference_mode():
            return work(join(store, rank, size, _CPU))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def same_everywhere(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of all ranks, which is the same to the bit."""
    for other in results[1:]:
        assert torch.equal(results[0], other)
    return results[0]
