"""Rows that begin behind pages which they did not write: a prefix cache's hits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm.executor.worker import Worker
from asyncllm.wire.messages import StepResult, unpack
from tests.support.models.page_copies import Script, build, load, plan, store


def answers(result: StepResult) -> list[tuple[int, float]]:
    """Token and logprob of each row."""
    tokens = unpack(result.tokens).tolist()
    assert [entry.row for entry in result.logprobs] == list(range(len(tokens)))
    return [(token, entry.sampled) for token, entry in zip(tokens, result.logprobs, strict=True)]


def check_shared_pages(worker: Worker) -> None:
    """Sequences on pages of another, and on such that have been through the host tier, answer as
    those that compute them."""
    prompt = np.random.default_rng(0).integers(4, 300, size=50).tolist()
    other = np.random.default_rng(1).integers(4, 300, size=50).tolist()
    # 12 pages hold the first 48 tokens.
    own = [(slot, index, 13 * slot + index) for slot in (0, 1) for index in range(13)]
    shared = [(slot, index, index) for slot in (2, 3) for index in range(12)]
    back = [(slot, index, 40 + index) for slot in (2, 3) for index in range(12)]
    last = [(2, 12, 30), (3, 12, 31)]
    alone: Any = {"rows": [(0, 0, 50), (1, 0, 49)], "admits": {0: prompt, 1: prompt[:49]}}
    hits: Any = {"rows": [(2, 48, 2), (3, 48, 1)], "admits": {2: prompt, 3: prompt[:49]}}
    script: Any = Script(
        [
            plan(0, new_pages=own, **alone),
            plan(1, new_pages=shared + last, **hits),
            plan(2, store([(page, 20 - page) for page in range(12)])),
            plan(3, rows=[(0, 0, 50)], admits={0: other}),
            plan(4, load([(40 + page, 20 - page) for page in range(12)]), rows=[(0, 50, 1)]),
            plan(5),
            plan(6, new_pages=back + last, **hits),
        ]
    )
    worker.run(script)
    assert [result.error for result in script.results] == [None] * 7
    expected = answers(script.results[0])
    assert answers(script.results[3])[0] != expected[0]
    for result in (script.results[1], script.results[6]):
        for (token, logprob), (right, right_logprob) in zip(answers(result), expected, strict=True):
            assert token == right
            assert logprob == pytest.approx(right_logprob, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "mistral"])
def test_a_first_row_can_begin_behind_pages_that_it_did_not_write(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    check_shared_pages(build(folder_of(family), dtype="float32", host_kv_gib=0.001))
