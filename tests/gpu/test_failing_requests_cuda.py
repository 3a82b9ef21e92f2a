"""A request that makes steps fail on a GPU: as graphs or kernel by kernel, with two in flight."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.llm.test_failing_requests import check_innocents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("where", ["admit", "collect"])
async def test_eight_innocents_of_nine_get_their_answers(
    where: str, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cuda", "gpu_memory_utilization": 0.2, "cuda_graphs": cuda_graphs}
    # Answers need not be the same in bfloat16, where the rows beside a row may round it otherwise.
    await check_innocents({**options, "dtype": "float32"}, where, monkeypatch, exact=False)
