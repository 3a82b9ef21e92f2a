"""Copies of recurrent states against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.kernels.recurrent import states as in_torch
from asyncllm.kernels.triton.recurrent.states import copy_states
from tests.support.kernels.device import DEVICE


@pytest.mark.parametrize("sizes", [(24, 5000), (4097, 0)])
def test_copies_happen_in_order(sizes: tuple[int, int]) -> None:
    inputs, matrices = (torch.randn(6, size, device=DEVICE) for size in sizes)
    inputs = inputs.to(torch.bfloat16)
    expected = inputs.clone(), matrices.clone()
    pairs = [(1, 2), (2, 3), (5, 2), (4, 1), (1, 1)]
    copies = torch.tensor(pairs, dtype=torch.int32, device=DEVICE)
    in_torch.copy_states.reference(*expected, copies)
    copy_states(inputs, matrices, copies)
    assert torch.equal(inputs, expected[0])
    assert torch.equal(matrices, expected[1])
