"""Answers to lists, and how long answers are when nobody says so."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, BadRequest, FinishReason, SamplingParams, SchedulingParams
from asyncllm.errors import DeadlineExceeded
from asyncllm.types import Completion
from tests.support.server.echo_llm import EchoLLM, echo_class

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "x" * 1000}]
LONG = "x" * 1000


def idle(llm: EchoLLM) -> bool:
    return not (llm.stats.running or llm.stats.waiting)


# -- lists -----------------------------------------------------------------------------------------


async def test_a_list_is_answered_in_its_order() -> None:
    async with echo_class()() as llm:
        prompts: list[Any] = ["one", [104, 105], [{"role": "user", "content": "x"}], "four"]
        answers = await llm.generate(prompts)
        assert [a.text for a in answers] == ["one", "hi", "user: x\nassistant: ", "four"]
        assert await llm.generate([]) == []
        assert isinstance(await llm.generate([104, 105]), Completion), "token ids are one prompt"


async def test_params_for_all_or_for_each() -> None:
    async with echo_class()() as llm:
        each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
        assert [a.text for a in await llm.generate(["abcd", "efgh"], each)] == ["a", "efg"]
        assert [a.text for a in await llm.generate(["abcd", "efgh"], each[0])] == ["a", "e"]
        with pytest.raises(BadRequest, match="2 prompts but 1 params"):
            await llm.generate(["a", "b"], each[:1])
        wanted = SchedulingParams(tenant="me")
        await llm.generate(["a", "b"], None, wanted)
        assert llm.scheduling[-2:] == [wanted] * 2


async def test_they_run_at_once_and_wait_for_places_in_the_queue() -> None:
    async with echo_class()() as llm:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, llm.stats.running)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        answers = await llm.generate([str(i) for i in range(5000)])  # the queue has 16 places
        watching.cancel()
        assert [a.text for a in answers] == [str(i) for i in range(5000)]
        assert most == llm.limits.max_num_seqs


async def test_the_first_error_cancels_the_others() -> None:
    async with echo_class(step_seconds=0.001)() as llm:
        with pytest.raises(BadRequest, match="prompt 2: This model's maximum context length"):
            await llm.generate([LONG, LONG, "b" * 5000, LONG])
        assert idle(llm)
        assert {1, 2} <= set(llm.aborted)
        llm.fail = DeadlineExceeded("too late")
        with pytest.raises(DeadlineExceeded):
            await llm.generate(["a", "b"])


async def test_cancelling_cancels_all() -> None:
    async with echo_class(step_seconds=0.001)() as llm:
        task = asyncio.create_task(llm.generate([LONG] * 50))
        await asyncio.sleep(0.1)
        assert llm.stats.waiting
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idle(llm)


# -- length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0)])
async def test_raw_text_ends_after_256_tokens_and_chats_do_not(
    params: SamplingParams | None,
) -> None:
    async with echo_class()() as llm:
        ids = list(LONG.encode())
        several = await llm.generate([LONG, CHAT, ids], params)
        for prompt, together in zip((LONG, CHAT, ids), several, strict=True):
            answer = await llm.generate(prompt, params)
            assert answer == together
            if prompt is CHAT:
                assert answer.finish_reason is FinishReason.STOP
                assert answer.usage.completion_tokens > 1000
            else:
                assert answer.finish_reason is FinishReason.LENGTH
                assert len(answer.token_ids) == 256
            deltas = [delta async for delta in llm.stream(prompt, params)]
            assert sum(len(delta.token_ids) for delta in deltas) == len(answer.token_ids)


async def test_what_is_asked_for_counts() -> None:
    async with echo_class()() as llm:
        assert len((await llm.generate(LONG, SamplingParams(max_tokens=500))).token_ids) == 500
        assert len((await llm.generate(LONG, SamplingParams(min_tokens=300))).token_ids) == 300
        # The context holds 4096 tokens: the room left is the limit where it is less.
        answer = await llm.generate([104] * 4000, SamplingParams(ignore_eos=True))
        assert (len(answer.token_ids), answer.finish_reason) == (96, FinishReason.LENGTH)


def test_likewise_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.llm.llm.AsyncLLM", echo_class())
    with LLM() as llm:
        raw, chat = llm.generate([LONG, CHAT], progress=False)
        assert len(raw.token_ids) == 256
        assert chat.finish_reason is FinishReason.STOP
        assert len(llm.generate(LONG).token_ids) == 256


def test_the_command_line_asks_texts_as_messages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from asyncllm.__main__ import main

    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", echo_class())
    file, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    rows: list[Any] = [{"prompt": "hi"}, {"messages": [{"role": "system", "content": "x"}]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main(["generate", str(file), "-o", str(out), "--chat"]) == 0
    found = {line["index"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert found[0]["text"] == "user: hi\nassistant: "
    assert found[0]["prompt"] == "hi"
    assert found[1]["text"] == "system: x\nassistant: "
    file.write_text(json.dumps({"prompt": [1, 2]}))
    assert main(["generate", str(file), "-o", str(out), "--chat", "--overwrite"]) == 1
    assert "prompt 0 is token ids" in capsys.readouterr().err


# -- long lists ------------------------------------------------------------------------------------


async def test_long_lists_let_the_loop_do_other_work() -> None:
    """While they begin, while they are answered, and when they are cancelled."""
    gc.collect()
    gc.freeze()  # what other tests have left takes no time of a turn
    async with AsyncLLM(device="sim") as llm:
        await llm.generate("a", SamplingParams(max_tokens=1))
        for prompt in ("short", [{"role": "user", "content": "short"}]):
            prompts = [prompt] * llm.limits.max_waiting
            each = [SamplingParams(max_tokens=i % 40, seed=i) for i in range(1, len(prompts) + 1)]
            for work in (llm.generate(prompts, each), llm.embed(prompts)):
                watching = asyncio.create_task(longest_turn())
                task = asyncio.create_task(work)
                await asyncio.wait([task], timeout=0.8)
                task.cancel()
                await asyncio.wait([task])
                watching.cancel()
                assert await watching < 0.1, prompt
        assert llm.stats.running == llm.stats.waiting == 0
    gc.unfreeze()


async def longest_turn() -> float:
    """Of the loop, in seconds of its thread's CPU time; until it is cancelled."""
    longest, began = 0.0, time.thread_time()
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0)
            longest, began = max(longest, time.thread_time() - began), time.thread_time()
    return longest
