"""Recurrent layers token by token: the same bits in any chunk, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels.recurrent import delta as delta_in_torch
from asyncllm.kernels.recurrent import mamba as mamba_in_torch
from asyncllm.kernels.triton.recurrent.ordered import ordered_delta_net, ordered_mamba
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, Mamba, StateRows
from tests.support.kernels.device import DEVICE

TOKENS = 20
#: From x and gates of some tokens, the state and the rows to results.
Layer = Callable[[slice, LayerState, StateRows], Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def delta_layer(dtype: torch.dtype, *, reference: bool = False) -> tuple[Layer, int, list[int]]:
    """It, and the sizes of its states: channels, and heads, keys and values."""
    torch.manual_seed(0)
    numbers = random(2), random(2)
    net = DeltaNet(
        1, 2, 16, 12, random(56, 4, dtype=dtype), *numbers, random(12, dtype=dtype), 1e-3
    )
    x, gates = random(TOKENS, 80, dtype=dtype), random(TOKENS, 4, dtype=dtype)
    run = delta_in_torch.gated_delta_net.reference if reference else ordered_delta_net
    return lambda part, *rest: run(x[part], gates[part], net, *rest), 56, [2, 16, 12]


def mamba_layer(dtype: torch.dtype, *, reference: bool = False) -> tuple[Layer, int, list[int]]:
    torch.manual_seed(0)
    weights = random(56, 4, dtype=dtype), random(56, dtype=dtype)
    net = Mamba(2, 1, 16, 12, *weights, random(2), random(2), random(2), (0.0, float("inf")))
    x = random(TOKENS, 24 + 56 + 2, dtype=dtype) * 0.5
    run = mamba_in_torch.mamba.reference if reference else ordered_mamba
    return lambda part, *rest: run(x[part], net, *rest), 56, [2, 16, 12]


def run(
    made: tuple[Layer, int, list[int]],
    dtype: torch.dtype,
    states: torch.dtype,
    cuts: Sequence[int],
    beside: int = 0,
) -> tuple[Tensor, Tensor]:
    """Results and the matrices at the end, of a sequence that is computed in parts.

    Args:
        beside: so many rows have the same tokens.
    """
    layer, channels, sizes = made
    inputs = torch.zeros(3 + beside, 4, channels, dtype=dtype, device=DEVICE)
    state = LayerState(inputs, torch.zeros(3 + beside, *sizes, dtype=states, device=DEVICE))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, TOKENS], strict=True):
        count = end - start
        numbers = [2, *range(3, 3 + beside)], [start] * (1 + beside)
        ends = [i * count for i in range(2 + beside)]
        slots, starts, offsets = (
            torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (*numbers, ends)
        )
        rows = StateRows(slots, starts, offsets, one_token=count == 1)
        if beside:
            repeated = torch.arange(start, end, device=DEVICE).repeat(1 + beside)
            out = layer(repeated, state, rows)  # type: ignore[arg-type]  # an index as well
        else:
            out = layer(slice(start, end), state, rows)
        parts.append(out[:count])
    assert state.matrices is not None
    return torch.cat(parts), state.matrices[2]


@pytest.mark.parametrize("make", [delta_layer, mamba_layer])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_no_cut_changes_a_bit(make: Callable[..., object], states: torch.dtype) -> None:
    dtype = torch.bfloat16
    made = make(dtype)
    whole, matrices = run(made, dtype, states, [])  # type: ignore[arg-type]
    for cuts, beside in ([1, 2, 18], 0), ([5, 6], 1):
        parts, left = run(made, dtype, states, cuts, beside)  # type: ignore[arg-type]
        assert torch.equal(parts, whole)
        assert torch.equal(left, matrices)
    expected, _ = run(make(dtype, reference=True), dtype, torch.float32, [])  # type: ignore[arg-type]
    error = (whole.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4e-2
