"""Greedy answers of transformers in float32, to compare the engine with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asyncllm import Completion, SamplingParams
from tests.support.models import tiny_models

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 100, 257, 600)
NEW_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=3)


class Expected(NamedTuple):
    """``logprobs`` is float32 [tokens, vocab]: before each token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor


@lru_cache
def answers(folder: Path) -> list[Expected]:
    """What transformers' ``generate`` gives on the CPU, for random prompts of many lengths."""
    model = tiny_models.reference(folder)
    vocab_size = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(1)
    expected = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(4, vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            whole = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
            logits = model(whole[:, :-1]).logits[0, length - 1 :]
        expected.append(
            Expected(prompt[0].tolist(), whole[0, length:].tolist(), logits.log_softmax(-1))
        )
    return expected


def check(completion: Completion, expected: Expected) -> None:
    """Equal tokens, and logprobs within 1e-4."""
    assert completion.token_ids == expected.tokens
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(expected.tokens)
    for entry, row in zip(completion.logprobs, expected.logprobs, strict=True):
        expected_logprob = row[entry.token_id].item()
        assert entry.logprob == pytest.approx(expected_logprob, abs=1e-4), (
            entry.logprob,
            expected_logprob,
        )
        best = row.topk(3).values.tolist()
        for (token, logprob), value in zip(entry.top, best, strict=True):
            assert logprob == pytest.approx(value, abs=1e-4)
            assert row[token].item() == pytest.approx(value, abs=1e-4)
