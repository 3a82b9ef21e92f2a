"""Batches in synchronous code and on the command line: whose turn it is, and room in the queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from asyncllm import LLM, AsyncLLM, SamplingParams
from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.engine.policy import Policy
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.errors import BadRequest
from asyncllm.types import SchedulingParams, TokenDelta
from tests.support.server.echo_llm import EchoLLM, echo_class


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EchoLLM]]:
    """Puts the fake engine in the place of AsyncLLM."""
    echo = echo_class()
    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", echo)
    monkeypatch.setattr("asyncllm.llm.llm.AsyncLLM", echo)
    interval = sys.getswitchinterval()
    yield echo
    sys.setswitchinterval(interval)


def engine_of(llm: LLM) -> EchoLLM:
    return cast("EchoLLM", llm._llm)


# -- whose turn it is ------------------------------------------------------------------------------


def test_the_longest_go_first_unless_something_else_is_named(echo: type[EchoLLM]) -> None:
    own = Policy()
    cases: list[tuple[dict[str, Any], str, Policy | None]] = [
        ({}, "longest", None),
        ({"max_num_seqs": 3}, "longest", None),
        ({"policy": "aged"}, "aged", None),
        ({"policy": own}, "longest", own),
        ({"config": EngineConfig()}, "fair", None),
        ({"config": EngineConfig(policy="fcfs")}, "fcfs", None),
        ({"config": EngineConfig(), "policy": own}, "fair", own),
    ]
    for options, named, policy in cases:
        with LLM(**options) as llm:
            engine = engine_of(llm)
            assert (engine.config.policy, engine.policy) == (named, policy), options


def test_a_policy_beside_a_configuration_that_names_one(echo: type[EchoLLM]) -> None:
    for options in ({"policy": "aged"}, {"max_num_seqs": 3}, {"model": "x"}):
        with pytest.raises(BadRequest, match="either config or model and options"):
            LLM(config=EngineConfig(), **cast("Any", options))
    with pytest.raises(BadRequest) as caught:
        LLM(policy=cast("Any", "random"))
    assert caught.value.param == "policy"


@pytest.mark.parametrize(
    ("options", "policy"), [((), "longest"), (("--policy", "fcfs"), "fcfs")], ids=str
)
def test_the_command_line_does_likewise(
    echo: type[EchoLLM], tmp_path: Path, options: tuple[str, ...], policy: str
) -> None:
    prompts, answers = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text("one\ntwo\n")
    assert main(["generate", str(prompts), "-o", str(answers), *options]) == 0
    assert echo.made[0].config.policy == policy
    assert {json.loads(line)["text"] for line in answers.read_text().splitlines()} == {"one", "two"}


def test_the_help_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("--policy {") == 1
    assert "fill whole steps (default: 0.0)" in text
    assert "(default: longest)" in text
    assert "(default: fair)" not in text


def test_scheduling_is_for_all(echo: type[EchoLLM]) -> None:
    wanted = SchedulingParams(priority=-3, cache_salt="s", tenant="me")
    params = SamplingParams(max_tokens=2)
    with LLM() as llm:
        llm.generate(["a", "b"], params, wanted, progress=False)
        llm.generate("a", params, wanted)
        list(llm.stream("a", params, wanted))
        assert engine_of(llm).scheduling == [wanted] * 4
        llm.generate("a")
        assert engine_of(llm).scheduling[-1] == SchedulingParams()


# -- room ------------------------------------------------------------------------------------------


class Cramped(EchoLLM):
    """A queue of few prompt tokens."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.limits = msgspec.structs.replace(self.limits, max_waiting_tokens=40, max_num_seqs=2)


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch, echo: type[EchoLLM]) -> None:
    for place in ("asyncllm.llm.async_llm.AsyncLLM", "asyncllm.llm.llm.AsyncLLM"):
        monkeypatch.setattr(place, type("Cramped", (Cramped, echo), {"made": []}))


PROMPTS = ["x" * (1 + 7 * i % 60) + str(i) for i in range(40)]


def test_a_batch_waits_for_room_in_a_queue_of_few_tokens(cramped: None) -> None:
    with LLM() as llm:
        answers = llm.generate(PROMPTS, progress=False)
        assert [answer.text for answer in answers] == PROMPTS
        # They came in their order, whatever the policy made of it.
        assert engine_of(llm).encoded == PROMPTS


def test_so_does_the_command_line(cramped: None, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "p.txt", tmp_path / "o.jsonl"
    prompts.write_text("\n".join(PROMPTS))
    assert main(["generate", str(prompts), "-o", str(answers)]) == 0
    texts = {json.loads(line)["text"] for line in answers.read_text().splitlines()}
    assert texts == set(PROMPTS)


SHORT = SamplingParams(max_tokens=1)


async def stream(llm: AsyncLLM) -> list[TokenDelta]:
    return [delta async for delta in llm.stream("a", SHORT)]


async def submit(llm: AsyncLLM) -> int:
    return llm.submit([5], SHORT, Collector())


CALLS: dict[str, Callable[[AsyncLLM], Coroutine[Any, Any, Any]]] = {
    "generate": lambda llm: llm.generate("a", SHORT),
    "stream": stream,
    "submit": submit,
    "embed": lambda llm: llm.embed([[5], [6]]),
    "prepare": lambda llm: llm.prepare(SamplingParams(bad_words=("a",))),
}


async def test_calls_from_another_loop_or_none() -> None:
    async with AsyncLLM(device="sim", max_model_len=64) as llm:
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match="started on another event loop"):
                await asyncio.to_thread(asyncio.run, call(llm))
        with pytest.raises(RuntimeError, match="for synchronous code"):
            await asyncio.to_thread(llm.submit, [5], SHORT, Collector())
        assert (llm.stats.waiting, llm.stats.running, llm.num_reserved) == (0, 0, 0)
        assert (await llm.generate("a", SHORT)).usage.completion_tokens == 1
        # What only reads may be read from anywhere.
        assert await asyncio.to_thread(lambda: llm.limits.max_model_len) == 64
