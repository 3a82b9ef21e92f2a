"""The kernels of masks and penalties against their references, and those against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from asyncllm.kernels import scores as in_torch
from asyncllm.kernels.scores import best_scores, mask_width
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.sampling.scores import log_sums, mask_scores, penalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 50, 5003])
def test_scores_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
    wide = (torch.randn(6, vocab + 13, device=DEVICE) * 3).to(dtype)
    logits = wide[:, :vocab]
    logits[0, 0], logits[1, vocab // 2], logits[5, -1] = math.nan, math.inf, -math.inf
    shape = 5, mask_width(vocab)
    masks = torch.randint(-(2**31), 2**31, shape, device=DEVICE, dtype=torch.int32)
    masks[2] = -1
    masks[3] = 0
    rows = torch.tensor([5, 0, 1, 3, 4], device=DEVICE)
    slots = torch.tensor([4, 2, 3, 2, 1], device=DEVICE)
    got = mask_scores(logits, rows, slots, masks)
    assert got.dtype == torch.float32
    want = in_torch.mask_scores.reference(logits, rows, slots, masks)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    for i, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
        for token in range(vocab):
            allowed = int(masks[slot, token // 32]) >> (token % 32) & 1
            raw = logits[row, token].item()
            expected = raw if allowed else raw - math.inf
            assert got[i, token].item() == pytest.approx(expected, abs=0, nan_ok=True)


def test_left_out_tokens_still_show_that_they_are_not_finite() -> None:
    logits = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0]], device=DEVICE)
    masks = torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    rows, slots = torch.arange(3, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    scores = mask_scores(logits, rows, slots, masks)[:, 0]
    assert scores.isnan().tolist() == [True, True, False]
    assert scores[2] == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [50, 5003])
def test_penalised_scores_are_those_of_the_reference(vocab: int, dtype: torch.dtype) -> None:
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


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("vocab", [1, 50, 5003])
def test_sums_of_a_row_do_not_depend_on_the_others(vocab: int) -> None:
    scores = torch.randn(9, vocab, device=DEVICE) * 5
    scores[0, 0], scores[1, vocab // 2] = -math.inf, math.nan
    sums = log_sums(scores)
    expected = in_torch.log_sums.reference(scores)
    torch.testing.assert_close(sums[1:], expected[1:], rtol=1e-6, atol=1e-6, equal_nan=True)
    for i in range(2, 9):
        assert torch.equal(log_sums(scores[i : i + 1].clone()), sums[i : i + 1])


def test_the_first_of_tokens_with_the_same_score_is_the_best() -> None:
    scores = torch.tensor([[1.0, -2.0, 3.0, 1.0, 3.0, 1.0], [-0.0, 0.0, -5.0, -1.0, -1.0, -9.0]])
    values, ids = best_scores(scores.to(DEVICE), 4)
    assert ids.tolist() == [[2, 4, 0, 3], [0, 1, 3, 4]]
    assert values.tolist() == [[3.0, 3.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0]]
