"""A request that makes the model's steps fail, among others that do not, on a real model."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import EngineDead, StepError
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.slots import SlotTable

BAD_SEED = 666


def params(i: int, seed: int | None = None) -> SamplingParams:
    """Some rows have state on the device or host that a retry must make anew."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    ]
    return SamplingParams(max_tokens=24, seed=i if seed is None else seed, **kinds[i % 4])


async def answers(llm: AsyncLLM, bad: int | None = None) -> list[Any]:
    requests = (
        llm.generate(f"{i}, {i + 1}, {i + 2},", params(i, BAD_SEED if i == bad else None))
        for i in range(9)
    )
    return await asyncio.gather(*requests, return_exceptions=True)


async def check_innocents(
    llm_options: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch, *, exact: bool
) -> None:
    """Eight of nine requests get their answers.

    Args:
        where: the ninth fails.
        exact: whether batches of other sizes give the very same tokens.
    """
    async with AsyncLLM(**llm_options) as llm:
        expected = await answers(llm)
        bad_slots: set[int] = set()
        admit = Sampler.admit

        def note(self: Sampler, slot: int, row: Any, *args: Any) -> None:
            bad_slots.discard(slot)
            if row.seed == BAD_SEED:
                bad_slots.add(slot)
                if where == "admit":
                    raise RuntimeError("planted")
            admit(self, slot, row, *args)

        monkeypatch.setattr(Sampler, "admit", note)
        if where == "launch":
            keep_last = SlotTable.keep_last

            def fail_after_sampling(self: SlotTable, slots: Any, tokens: Any) -> None:
                keep_last(self, slots, tokens)
                if bad_slots.intersection(np.asarray(slots).tolist()):
                    raise RuntimeError("planted")

            monkeypatch.setattr(SlotTable, "keep_last", fail_after_sampling)
        if where == "collect":
            launch, collect = ModelRunner.launch, ModelRunner.collect
            bad_steps: set[int] = set()

            def remember(self: ModelRunner, plan: Any) -> Any:
                ticket = launch(self, plan)
                slots = np.frombuffer(plan.rows, "<i4").reshape(-1, 3)[:, 0]
                if bad_slots.intersection(slots.tolist()):
                    bad_steps.add(plan.step)
                return ticket

            def fail_when_read(self: ModelRunner, ticket: Any) -> Any:
                result = collect(self, ticket)
                if ticket.step in bad_steps:
                    raise RuntimeError("planted")
                return result

            monkeypatch.setattr(ModelRunner, "launch", remember)
            monkeypatch.setattr(ModelRunner, "collect", fail_when_read)
        got = await answers(llm, bad=4)
        for i, (answer, before) in enumerate(zip(got, expected, strict=True)):
            if i == 4:
                assert isinstance(answer, StepError)
                assert "planted" not in str(answer)
            else:
                assert answer.finish_reason is before.finish_reason, f"request {i}"
                assert answer.text == before.text or not exact, f"request {i}"
                assert (answer.logprobs is None) == (before.logprobs is None)
        stats = llm.stats
        assert stats.errors["step"] == 1
        assert stats.pages_held == stats.running == stats.waiting == 0


@pytest.mark.parametrize("where", ["admit", "launch", "collect"])
async def test_eight_innocents_of_nine_get_their_answers(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cpu", "cpu_threads": 1}
    await check_innocents(options, where, monkeypatch, exact=True)


async def test_when_the_scheduler_raises_callers_are_told_and_the_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())  # another test may have left one behind
    async with asyncio.timeout(60):
        async with AsyncLLM(device="cpu", cpu_threads=1) as llm:
            await llm.generate("1, 2, 3,", params(0))

            def planted(self: Scheduler, *_: Any) -> None:
                self.batch.running.clear()
                raise RuntimeError("planted")

            monkeypatch.setattr(Scheduler, "apply", planted)
            told = await asyncio.gather(
                *(llm.generate("1, 2, 3,", params(i)) for i in range(3)), return_exceptions=True
            )
            assert [type(error) for error in told] == [EngineDead] * 3
            assert not llm.healthy
            with pytest.raises(EngineDead):
                await llm.generate("1, 2, 3,", params(0))
    left = set(threading.enumerate()) - before
    assert "asyncllm-executor" not in [thread.name for thread in left]
