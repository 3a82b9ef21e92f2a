"""Gated delta nets and short convolutions against the same in plain torch, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels.recurrent import convolution as convolution_in_torch
from asyncllm.kernels.recurrent import delta as delta_in_torch
from asyncllm.kernels.triton.recurrent.convolution import short_convolution
from asyncllm.kernels.triton.recurrent.delta import gated_delta_net
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, StateRows
from tests.support.kernels.device import DEVICE
from tests.support.kernels.leftovers import leave_behind

SLOTS = 7


class Sizes(NamedTuple):
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    width: int = 4


class Case:
    """Random rows (start, tokens) in the slots from 1 on, with padding after them."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        sizes: Sizes,
        dtype: torch.dtype = torch.float32,
        padding: tuple[int, int] = (0, 0),
        states: torch.dtype = torch.float32,
    ):
        heads, dims = (sizes.key_heads, sizes.value_heads), (sizes.key_dim, sizes.value_dim)
        channels = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        values = heads[1] * dims[1]
        tokens = sum(count for _, count in spans) + padding[1]
        self.net = DeltaNet(
            *heads,
            *dims,
            convolution=self.random(channels, sizes.width, dtype=dtype),
            decay=self.random(heads[1]),
            step_bias=self.random(heads[1]),
            norm=self.random(dims[1], dtype=dtype),
            eps=1e-3,
        )
        self.x = self.random(tokens, channels + values, dtype=dtype)
        self.gates = self.random(tokens, 2 * heads[1], dtype=dtype)
        storage = self.random(SLOTS, sizes.width * channels + 10, dtype=dtype)
        inputs = storage[:, 8:-2].unflatten(1, (sizes.width, channels))
        matrices = self.random(SLOTS, heads[1] * dims[0] * dims[1] + 4)[:, 4:] * 0.1
        matrices = matrices.to(states).unflatten(1, (heads[1], *dims))
        self.state = LayerState(inputs, matrices)
        leave_behind(self.state, [0, *(start for start, _ in spans)])
        slots = [*range(1, len(spans) + 1), *([0] * padding[0])]
        starts = [*(start for start, _ in spans), *([0] * padding[0])]
        counts = [count for _, count in spans]
        ends = torch.tensor(counts).cumsum(0).tolist()
        offsets = [0, *ends, *([ends[-1]] * padding[0])]
        self.rows = self.rows_of(slots, starts, offsets, one_token=set(counts) == {1})
        self.used = ends[-1]

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    def rows_of(self, *parts: list[int], one_token: bool) -> StateRows:
        slots, starts, offsets = (torch.tensor(p, dtype=torch.int32, device=DEVICE) for p in parts)
        return StateRows(slots, starts, offsets, one_token)

    def check(self, tolerance: float) -> None:
        """The kernels give what plain torch gives in float32, and leave the same states."""
        expected_state = LayerState(*(part.clone().float() for part in self.state))  # type: ignore[union-attr]
        net = self.net._replace(
            convolution=self.net.convolution.float(), norm=self.net.norm.float()
        )
        float32 = self.x.float(), self.gates.float(), net
        expected = delta_in_torch.gated_delta_net.reference(*float32, expected_state, self.rows)
        assert expected.isfinite().all()
        actual = gated_delta_net(self.x, self.gates, self.net, self.state, self.rows)
        assert actual.dtype == self.x.dtype
        assert actual.isfinite().all()
        near(actual[: self.used], expected[: self.used], tolerance)
        assert self.state.matrices is not None
        assert expected_state.matrices is not None
        near(self.state.inputs[1:], expected_state.inputs[1:], 0)
        near(self.state.matrices[1:], expected_state.matrices[1:], tolerance)


def near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        actual.float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


ONE_TOKEN = [(0, 1), (1, 1), (2, 1), (3, 1), (50, 1)]
PROMPTS = [(0, 1), (7, 1), (0, 65), (0, 2), (3, 130)]


@pytest.mark.parametrize("spans", [ONE_TOKEN, PROMPTS, [(1, 3)], [(9, 1), (0, 64)]])
def test_rows_of_any_length(spans: list[tuple[int, int]]) -> None:
    Case(spans, Sizes(1, 2, 16, 32)).check(2e-5)


def test_rows_of_one_token_beside_prompts() -> None:
    """They are convolved and normalised with them, and advanced by another kernel."""
    Case([*ONE_TOKEN, (0, 2)], Sizes(1, 2, 16, 64)).check(2e-5)
    Case([*ONE_TOKEN[:2], (0, 2)], Sizes(1, 1, 24, 40)).check(2e-5)
    Case([*ONE_TOKEN, (0, 2)], Sizes(), torch.bfloat16).check(6e-2)


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
def test_heads_that_share_keys(heads: tuple[int, int]) -> None:
    Case([(9, 1), (0, 5), (2, 3)], Sizes(*heads, 16, 16)).check(2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_between_kernels_only(dtype: torch.dtype) -> None:
    Case(ONE_TOKEN[:2], Sizes(), dtype).check(2e-2)
    Case([(0, 66), (3, 1)], Sizes(1, 2), dtype).check(6e-2)


def test_states_in_16_bits_are_rounded_after_each_step() -> None:
    Case(ONE_TOKEN, Sizes(1, 2, 16, 32), states=torch.bfloat16).check(2e-2)
    Case(PROMPTS, Sizes(1, 1, 16, 16), states=torch.bfloat16).check(2e-2)


@pytest.mark.parametrize(("keys", "values"), [(128, 128), (24, 40), (16, 24)])
def test_sizes_of_heads(keys: int, values: int) -> None:
    Case([(0, 66), (5, 1)], Sizes(1, 1, keys, values)).check(2e-5)
    Case([(6, 1)], Sizes(1, 2, keys, values)).check(2e-5)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_widths_of_the_convolution(width: int) -> None:
    Case([(2, 3), (0, 1), (7, 6)], Sizes(1, 1, 16, 16, width)).check(2e-5)


def test_padding_changes_no_state() -> None:
    small = Sizes(1, 2, 16, 16)
    Case([(4, 3), (9, 1)], small, padding=(2, 5)).check(2e-5)
    one_by_one = Case([(3, 1), (0, 1)], small, padding=(2, 2))
    one_by_one.rows = one_by_one.rows_of(
        [1, 2, 0, 0], [3, 0, 0, 0], [0, 1, 2, 3, 4], one_token=True
    )
    one_by_one.check(2e-5)


def test_equal_keys_do_not_spoil_the_inverse() -> None:
    """Tokens that are all alike: powers of their triangle are huge."""
    case = Case([(0, 64)], Sizes(1, 1))
    case.x[:] = case.x[:1]
    case.gates[:] = 4.0  # they are replaced, and nothing decays
    case.net.decay.fill_(-20.0)
    case.check(1e-4)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_short_convolutions(silu: bool, has_bias: bool) -> None:
    case = Case(PROMPTS, Sizes(1, 1, width=3), padding=(1, 4))
    channels = case.net.channels
    bias = case.random(channels) if has_bias else None
    x, weight, states = case.x[:, :channels], case.net.convolution, case.state.inputs
    expected_states = states.clone()
    arguments = x, weight, bias
    expected = convolution_in_torch.short_convolution.reference(
        *arguments, expected_states, case.rows, silu=silu
    )
    actual = short_convolution(*arguments, states, case.rows, silu=silu)
    near(actual, expected, 1e-5)
    assert expected.isfinite().all()
    near(states[1:], expected_states[1:], 0)
