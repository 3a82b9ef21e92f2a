"""Mamba-2 against the same in plain torch, in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels.recurrent import mamba as in_torch
from asyncllm.kernels.triton.recurrent.mamba import mamba
from asyncllm.kernels.types.recurrent import LayerState, Mamba, StateRows
from tests.support.kernels.device import DEVICE
from tests.support.kernels.leftovers import leave_behind


def check(
    spans: list[tuple[int, int]],
    sizes: tuple[int, int, int, int] = (4, 2, 16, 16),
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
    limits: tuple[float, float] = (0.0, math.inf),
    has_bias: bool = True,
    states: torch.dtype = torch.float32,
    padding: int = 0,
) -> None:
    """Rows (start, tokens), then padding: tokens of no row, or rows of slot 0.

    Args:
        sizes: heads, groups, elements of keys and of values.
    """

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    heads, groups, keys, values = sizes
    channels = heads * values + 2 * groups * keys
    bias = random(channels, dtype=dtype) if has_bias else None
    convolution = random(channels, 4, dtype=dtype)
    net = Mamba(*sizes, convolution, bias, random(heads), random(heads), random(heads), limits)
    used = sum(count for _, count in spans)
    one_token = used == len(spans)
    tokens = used + (padding if one_token else 3)
    x = random(tokens, net.inner + channels + heads, dtype=dtype) * 0.5
    state = LayerState(
        random(7, 4, channels, dtype=dtype), random(7, heads, keys, values, dtype=states)
    )
    leave_behind(state, [0, *(start for start, _ in spans)])
    offsets = [0, *torch.tensor([count for _, count in spans] + [1] * padding).cumsum(0).tolist()]
    of_padding = [0] * padding
    parts = (
        [*range(1, len(spans) + 1), *of_padding],
        [*(start for start, _ in spans), *of_padding],
        offsets,
    )
    slots, starts, ends = (torch.tensor(p, dtype=torch.int32, device=DEVICE) for p in parts)
    rows = StateRows(slots, starts, ends, one_token)
    assert state.matrices is not None
    matrices = state.matrices.clone().float()
    kept = LayerState(state.inputs.clone().float(), matrices)
    in_float32 = net._replace(
        convolution=net.convolution.float(), bias=None if bias is None else bias.float()
    )
    unused = slice(len(spans) + 1, None)
    untouched = matrices[unused].clone(), kept.inputs[unused].clone()
    expected = in_torch.mamba.reference(x.float(), in_float32, kept, rows)
    actual = mamba(x, net, state, rows)
    assert actual.isfinite().all()
    assert torch.equal(state.matrices[unused].float(), untouched[0])
    assert torch.equal(state.inputs[unused].float(), untouched[1])
    torch.testing.assert_close(
        actual[:used].float(), expected[:used], rtol=tolerance, atol=tolerance
    )
    for slot, (start, count) in enumerate(spans, 1):
        torch.testing.assert_close(
            state.matrices[slot].float(), matrices[slot], rtol=tolerance, atol=tolerance
        )
        end = start + count
        assert torch.equal(state.inputs[slot, :end].float(), kept.inputs[slot, :end])


@pytest.mark.parametrize("spans", [[(0, 1), (2, 1), (30, 1)], [(0, 1), (3, 66), (0, 2), (9, 1)]])
def test_rows_of_any_length(spans: list[tuple[int, int]]) -> None:
    check(spans)


def test_padding_changes_no_state() -> None:
    check([(3, 1), (0, 1)], padding=2)


@pytest.mark.parametrize("sizes", [(3, 1, 24, 40), (2, 2, 128, 64)])
def test_sizes_of_heads(sizes: tuple[int, int, int, int]) -> None:
    check([(0, 5), (5, 1)], sizes)


def test_steps_have_limits() -> None:
    check([(0, 5), (5, 1)], limits=(0.4, 0.6), has_bias=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_between_kernels_only(dtype: torch.dtype) -> None:
    check([(0, 10), (5, 1)], dtype=dtype, tolerance=6e-2)


def test_states_in_16_bits_are_rounded_after_each_step() -> None:
    check([(0, 1), (2, 1)], states=torch.bfloat16, tolerance=2e-2)
    check([(0, 1), (3, 66), (9, 1)], states=torch.bfloat16, tolerance=2e-2)
