"""A launcher takes the variant that was compiled for such arguments; launches share memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from asyncllm.kernels.triton.launch import Launcher, Scratch, cdiv, next_power_of_2


@triton.jit
def _scaled_copy(
    x, bias, y, count, stride, factor, BLOCK: tl.constexpr, SIGN: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i * stride, mask=i < count).to(tl.float32) * factor * SIGN
    if bias is not None:
        values += tl.load(bias)
    tl.store(y + i, values.to(y.dtype.element_ty), mask=i < count)


def test_variants() -> None:
    """Sizes that are 1, divisible by 16 or neither; pointers, types and absences of each kind."""
    launch = Launcher(_scaled_copy)
    whole = torch.randn(700, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    sizes = list(product((1, 2, 16, 37), (1, 3)))
    kinds = list(product((torch.float32, torch.float16), (0, 1, 8), (None, one), (-1,)))
    usual_size, usual_kind = (37, 3), (torch.float32, 0, one, 1)
    cases = [(size, usual_kind) for size in sizes] + [(usual_size, kind) for kind in kinds]
    for (count, stride), (dtype, start, bias, sign) in 2 * cases:  # compiled, and found
        x = whole.to(dtype)[start:]
        y = torch.full((count + 1,), torch.nan, dtype=dtype, device=DEVICE)
        launch((cdiv(count, 16), 1, 1), (x, bias, y, count, stride, 0.5), (16, sign), 4)
        assert torch.equal(y[:count], copy_reference(x, bias, count, stride, sign))
        assert y[count].isnan()


def copy_reference(x: Tensor, bias: Tensor | None, count: int, stride: int, sign: int) -> Tensor:
    values = x[: count * stride : stride].float() * 0.5 * sign
    return (values if bias is None else values + bias).to(x.dtype)


def test_sizes() -> None:
    for a, b in product(range(1, 40), range(1, 10)):
        assert cdiv(a, b) == triton.cdiv(a, b)
    for n in range(1, 70):
        assert next_power_of_2(n) == triton.next_power_of_2(n)


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
