"""Sums in the order of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.parallel.collectives import OrderedSums
from asyncllm.parallel.ranks import Ranks
from tests.support.parallel.threads import run_ranks, same_everywhere


def test_sums_are_in_float32_in_the_order_of_the_ranks_and_the_residual_comes_last() -> None:
    parts = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = torch.full((5, 8), 0.3).bfloat16()

    def work(ranks: Ranks) -> Tensor:
        sums = OrderedSums(3, ranks)  # type: ignore[arg-type]  # which can abort
        alone = sums.sum(parts[ranks.rank].clone(), None)
        residual = base.clone()
        assert sums.sum(parts[ranks.rank].clone(), residual) is residual
        one_row = sums.sum(parts[ranks.rank, :1].clone(), None)
        return torch.cat((alone, residual, one_row))

    found = same_everywhere(run_ranks(3, work))
    total = parts[0].float() + parts[1].float() + parts[2].float()
    expected = torch.cat((total, total + base.float(), total[:1])).bfloat16()
    assert torch.equal(found, expected)
