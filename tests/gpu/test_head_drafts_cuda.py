"""With ``--deterministic``, what a head drafts changes no bit on a GPU, captured or not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from tests.support.engine.head_drafts import KnownAnswers, always_draft
from tests.support.models import eagle3, tiny_models
from tests.support.text import tokenizers as tokenizers_for_tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPTS = [[5 + (7 * n + i * i) % 300 for i in range(9 + 40 * n)] for n in range(7)]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "deterministic": True,
    "gpu_memory_utilization": 0.5,
    "max_model_len": 512,
    "max_num_seqs": 32,
}


def options_of(folder: Path) -> dict[str, Any]:
    target = tiny_models.make("llama", folder / "target", num_hidden_layers=4)
    (target / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    head = eagle3.write(folder / "head", reads=(1, 2, 3))
    return {"model": str(target), "draft": str(head)}


@pytest.mark.parametrize("graphs", [True, False])
async def test_answers_have_the_same_bits(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(tmp_path)
    async with AsyncLLM(**options, **OPTIONS, cuda_graphs=graphs) as llm:

        async def answers(**params: Any) -> list[list[int]]:
            asked = (
                llm.generate(
                    prompt, SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **params)
                )
                for i, prompt in enumerate(PROMPTS)
            )
            return [list(answer.token_ids) for answer in await asyncio.gather(*asked)]

        for params in ({"temperature": 0.0}, {"temperature": 1.0}):
            with monkeypatch.context() as patch:
                patch.setattr(LearnedSpeculation, "_keeps_out", lambda *_: True)
                plain = await answers(**params)
            with monkeypatch.context() as patch:
                whole = [[*p, *own] for p, own in zip(PROMPTS, plain, strict=True)]
                KnownAnswers(whole, patch, seed=1)
                counts = always_draft(llm, patch)
                assert await answers(**params) == plain
                assert max(counts) == 3
