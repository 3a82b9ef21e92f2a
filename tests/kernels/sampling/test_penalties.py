"""The kernel of penalties against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from asyncllm.kernels import scores as in_torch
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.sampling.scores import penalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [50, 5003])
def test_scores_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    num_slots, num_rows = 5, 6
    wide = (torch.randn(num_rows, vocab + 13, device=DEVICE) * 3).to(dtype)
    logits = wide[:, :vocab]
    logits[0, 3], logits[1, 4], logits[5, 5] = math.nan, math.inf, -math.inf
    counts = torch.randint(-9, 4, (num_slots, vocab), device=DEVICE).clamp(min=0).int()
    in_prompt = (torch.rand(num_slots, vocab, device=DEVICE) < 0.2).to(torch.uint8)
    penalties = torch.rand(num_slots, 3, device=DEVICE) + 0.5
    penalties[2] = torch.tensor([1.0, 0.0, 0.0])
    rows = torch.tensor([5, 0, 1, 3], device=DEVICE)
    slots = torch.tensor([4, 2, 0, 1], device=DEVICE)
    args = (logits, rows, slots, penalties, counts, in_prompt)
    got, want = penalise(*args), in_torch.penalise.reference(*args)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(got[1].nan_to_num(), logits[0].float().nan_to_num())
