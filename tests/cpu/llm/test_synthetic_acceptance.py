"""Synthetic acceptance: as many drafted tokens are right as were asked for; never with a model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm import AsyncLLM, BadRequest, SamplingParams
from asyncllm.config import EngineConfig, most_drafted, synthetic_rate
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from asyncllm.executor.sim import virtual_time

DRAFT = 4


def config(mean: Any, **options: Any) -> dict[str, Any]:
    speculation = {"num_speculative_tokens": DRAFT, "synthetic_acceptance": mean}
    given: dict[str, Any] = {"load_format": "dummy", "max_model_len": 400, "max_num_seqs": 16}
    return given | {"speculative_config": speculation} | options


async def tokens_a_row(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, count: int, **params: Any
) -> float:
    """Drafts of the full length are always tried; the answers are as long as they should be."""

    def best(self: Any, wanting: Any, *_: Any, in_flight: bool) -> tuple[list[int], bool]:
        return [min(DRAFT, len(each.found.tokens)) for each in wanting], in_flight

    monkeypatch.setattr(LearnedSpeculation, "_best", best)
    monkeypatch.setattr("asyncllm.engine.drafts.drafting.FIRST_PAUSE", 0)
    given = {"max_tokens": count, "ignore_eos": True, **params}
    asked = (llm.generate([5 + i] * 9, SamplingParams(seed=i, **given)) for i in range(3))
    answers = await asyncio.gather(*asked)
    assert [len(answer.token_ids) for answer in answers] == 3 * [count]
    drafted, right = llm.stats.drafted["lookup"], llm.stats.drafted_right["lookup"]
    assert drafted > count
    return 1 + DRAFT * right / drafted


async def test_rows_yield_that_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM(device="cpu", **config(2.5)) as llm:
        assert await tokens_a_row(llm, monkeypatch, 80) == pytest.approx(2.5, abs=0.5)
        # Rows that are sampled one after the other go on as well.
        found = await tokens_a_row(llm, monkeypatch, 24, repetition_penalty=1.2, logprobs=1)
        assert found == pytest.approx(2.5, abs=0.5)
        assert llm.stats.books_healed == 0


@pytest.mark.parametrize("mean", [1.0, 2.5, 5.0])
def test_the_simulated_device_has_it_too(monkeypatch: pytest.MonkeyPatch, mean: float) -> None:
    async def run() -> float:
        async with AsyncLLM(device="sim", **config(mean)) as llm:
            return await tokens_a_row(llm, monkeypatch, 300)

    assert virtual_time.run(run()) == pytest.approx(mean, abs=0.25)


@pytest.mark.parametrize(
    ("mean", "rate"), [(1, 0.0), (5, 1.0), (1 + 0.5 + 0.25 + 0.125 + 0.0625, 0.5)]
)
def test_the_rate_gives_the_mean(mean: float, rate: float) -> None:
    given = {"num_speculative_tokens": DRAFT, "synthetic_acceptance": mean}
    assert synthetic_rate(given) == pytest.approx(rate)


def test_without_it_there_is_no_rate() -> None:
    assert synthetic_rate(None) is None
    assert synthetic_rate({"method": "ngram"}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (config(0.9), r"from 1 to num_speculative_tokens \+ 1 \(5\), not 0.9"),
        (config(5.1), r"not 5.1"),
        (config(float("nan")), "not nan"),
        (config("3"), "synthetic_acceptance"),
        (config(3, load_format="auto"), "synthetic_acceptance needs load_format dummy"),
        (config(3, load_format="auto", device="cpu"), "needs load_format dummy"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        EngineConfig(**options)
    assert caught.value.param == "speculative_config"


def test_a_draft_has_no_more_tokens_than_a_step_has_rows_for() -> None:
    for given in (None, {"method": "ngram"}):
        assert [most_drafted(given, rows) for rows in (1, 4, 8, 9, 256)] == [0, 3, 7, 8, 8]
