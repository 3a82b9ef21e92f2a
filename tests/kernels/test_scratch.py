"""Memory that the launches of a kernel share: of each thread, and never moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.launch import Scratch

PLACE = torch.device(DEVICE)


def test_a_thread_gets_the_same_memory_again() -> None:
    scratch = Scratch()
    floats, counters = scratch.floats(100, PLACE), scratch.counters(30, PLACE)
    assert not counters.any()
    assert scratch.floats(70, PLACE).data_ptr() == floats.data_ptr()
    assert scratch.counters(30, PLACE).data_ptr() == counters.data_ptr()


def test_memory_that_graphs_may_use_stays() -> None:
    scratch = Scratch()
    small = scratch.floats(100, PLACE).fill_(7)
    address = small.data_ptr()
    del small
    large = scratch.floats(1000, PLACE).zero_()
    others = [torch.zeros(100, device=PLACE) for _ in range(20)]
    assert address not in [tensor.data_ptr() for tensor in [large, *others]]


def test_threads_share_nothing() -> None:
    scratch = Scratch()

    def take(_: int) -> tuple[Tensor, Tensor]:
        return scratch.floats(100, PLACE), scratch.counters(30, PLACE)

    mine = take(0)
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(take, 0).result()
        again = thread.submit(take, 0).result()
    for ours, other, same in zip(mine, theirs, again, strict=True):
        assert ours.data_ptr() != other.data_ptr()
        assert other.data_ptr() == same.data_ptr()


def test_kernels_share_nothing() -> None:
    first, second = Scratch(), Scratch()
    assert first.floats(100, PLACE).data_ptr() != second.floats(100, PLACE).data_ptr()
