"""LLM: synchronous code, an event loop in the background; on a fake engine and on the demo."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import tqdm
from rich.console import Console
from rich.live import Live, _RefreshThread
from rich.progress import Progress

from asyncllm import LLM, SamplingParams
from asyncllm.errors import BadRequest, EngineDead, ModelError
from asyncllm.system.terminal import is_free, progress_bar
from tests.support.server.echo_llm import EchoLLM, echo_class

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Makes an LLM on a fake engine that repeats prompts."""

    def make(**attributes: Any) -> LLM:
        monkeypatch.setattr("asyncllm.llm.llm.AsyncLLM", echo_class(**attributes))
        return LLM()

    return make


def engine_of(llm: LLM) -> EchoLLM:
    return cast("EchoLLM", llm._llm)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def loop_threads() -> int:
    return sum(thread.name == "asyncllm-loop" for thread in threading.enumerate())


def test_answers_are_in_the_order_of_the_prompts(make_llm: MakeLLM) -> None:
    prompts = ["x" * (1 + i * 7 % 13) + str(i) for i in range(100)]
    with make_llm() as llm:
        answers = llm.generate(prompts, progress=False)
    assert [answer.text for answer in answers] == prompts


def test_forms_of_prompts_may_be_mixed(make_llm: MakeLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with make_llm() as llm:
        texts = [a.text for a in llm.generate(["hi", [104, 105], messages], progress=False)]
        assert texts == ["hi", "hi", "user: hi\nassistant: "]


def test_one_prompt_gives_one_answer(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        assert llm.generate("hi").text == "hi"
        assert llm.generate([104, 105]).text == "hi"
        assert llm.generate([{"role": "user", "content": "hi"}]).text == "user: hi\nassistant: "
        no_prompts: list[str] = []
        assert llm.generate(no_prompts) == []


def test_params_for_all_or_for_each(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        answers = llm.generate(["abcd", "efgh"], SamplingParams(max_tokens=2), progress=False)
        assert [a.text for a in answers] == ["ab", "ef"]
        each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)]
        answers = llm.generate(["abcd", "efgh"], each, progress=False)
        assert [a.text for a in answers] == ["a", "efg"]
        with pytest.raises(BadRequest, match="2 prompts but 1 params"):
            llm.generate(["a", "b"], each[:1])
        with pytest.raises(BadRequest, match="params must be SamplingParams, not list"):
            llm.generate("a", each)


def test_the_queue_never_overflows_even_from_several_threads(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        prompts = [str(i) for i in range(200)]
        results: list[list[str]] = []

        def work() -> None:
            results.append([a.text for a in llm.generate(prompts, progress=False)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [prompts] * 4


def test_a_bad_prompt_is_named_and_ends_the_call(make_llm: MakeLLM) -> None:
    with make_llm(step_seconds=0.001) as llm:
        with pytest.raises(
            BadRequest, match="prompt 3: This model's maximum context length is"
        ) as caught:
            llm.generate(["a" * 1000] * 3 + ["b" * 5000] + ["c"] * 100, progress=False)
        assert caught.value.code == "context_length_exceeded"
        engine = engine_of(llm)
        wait_until(lambda: engine.stats.running == engine.stats.waiting == 0)
        assert llm.generate("still here").text == "still here"


def test_streams(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        deltas = list(llm.stream("Grüße"))
        assert "".join(delta.text for delta in deltas) == "Grüße"
        assert [d.finish_reason for d in deltas][-1] == "stop"
        with pytest.raises(BadRequest):
            list(llm.stream("a" * 5000))


def test_leaving_a_stream_cancels_the_request(make_llm: MakeLLM) -> None:
    with make_llm(step_seconds=0.001) as llm:
        engine = engine_of(llm)
        for delta in llm.stream("a" * 4000):
            assert delta.text
            break
        wait_until(lambda: engine.stats.running == 0)
        assert len(engine.aborted) == 1


async def test_works_inside_a_running_loop(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        assert llm.generate(["a", "b"], progress=False)[1].text == "b"
        assert "".join(delta.text for delta in llm.stream("abc")) == "abc"
    assert asyncio.get_running_loop().is_running()


def test_keyboard_interrupt_cancels_and_leaves_the_model_usable(make_llm: MakeLLM) -> None:
    with make_llm(step_seconds=0.01) as llm:
        engine = engine_of(llm)
        for call in (
            lambda: llm.generate(["a" * 3000] * 100, progress=False),
            lambda: llm.generate("a" * 3000),
            lambda: list(llm.stream("a" * 3000)),
        ):
            interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            interrupt.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            wait_until(lambda: engine.stats.running == engine.stats.waiting == 0)
        assert llm.generate(["b"], progress=False)[0].text == "b"


def test_the_progress_bar_counts_prompts_and_tokens(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_llm() as llm:
        llm.generate(["a", "b", "c"], progress=True)
        drawn = capsys.readouterr().err
        assert "3/3" in drawn
        assert "tok/s" in drawn
        llm.generate(["a", "b", "c"])  # stderr is no terminal
        llm.generate(["a", "b", "c"], progress=False)
        llm.generate("a", progress=True)
    assert capsys.readouterr().err == ""


def test_in_a_terminal_it_is_drawn_unless_another_bar_is(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def drawn() -> bool:
        capsys.readouterr()
        llm.generate(["a", "b"])
        return "2/2" in capsys.readouterr().err

    with make_llm() as llm:
        assert drawn()
        for _ in tqdm.tqdm(["batch"]):
            assert not drawn()
        with Progress(console=Console(stderr=True)):
            assert not drawn()
        with progress_bar("", 2, "steps"):
            assert not drawn()
        assert drawn()


def test_a_bar_that_has_ended_leaves_the_terminal_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although rich's thread, for which it does not wait, still runs."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    thread = _RefreshThread(Live(), 1.0)
    monkeypatch.setattr("threading.enumerate", lambda: [thread])
    assert not is_free()
    thread.done.set()
    assert is_free()


def test_close_ends_the_thread_and_later_calls(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    assert not engine_of(llm).healthy
    assert loop_threads() == 0
    with pytest.raises(EngineDead):
        llm.generate("a")
    with pytest.raises(EngineDead):
        llm.generate(["a", "b"], progress=False)
    with pytest.raises(EngineDead):
        next(llm.stream("a"))


def test_dropping_the_last_reference_closes(make_llm: MakeLLM) -> None:
    llm = make_llm()
    engine = engine_of(llm)
    llm.generate(["a"], progress=False)
    del llm
    gc.collect()
    wait_until(lambda: not engine.healthy and loop_threads() == 0)


def test_a_model_that_cannot_be_loaded(make_llm: MakeLLM) -> None:
    with pytest.raises(ModelError, match="no such model"):
        make_llm(load_error=ModelError("no such model"))
    wait_until(lambda: loop_threads() == 0)


def test_options_reach_the_engine(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.llm.llm.AsyncLLM", echo_class())
    with LLM("some/model", max_num_seqs=3, device="cpu") as llm:
        config = engine_of(llm).config
    assert (config.model, config.max_num_seqs, config.device) == ("some/model", 3, "cpu")


def test_a_forgotten_close_does_not_hang_the_exit() -> None:
    program = """
import asyncllm.llm.llm
from tests.support.server.echo_llm import echo_class
asyncllm.llm.llm.AsyncLLM = echo_class()
llm = asyncllm.llm.llm.LLM()
print(llm.generate("fine").text)
deltas = llm.stream("a stream left open")
next(deltas)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


# -- the demo model --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(device="cpu", cpu_threads=1, max_num_seqs=8) as llm:
        yield llm


GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_the_demo_answers_many_prompts_as_it_answers_each(demo: LLM) -> None:
    prompts: list[Any] = [
        "Once upon a time",
        [{"role": "user", "content": "What is 2+2?"}],
        [20, 332, 223],
    ]
    alone = [demo.generate(prompt, GREEDY) for prompt in prompts]
    assert alone[1].text == "2 + 2 = 4"
    together = demo.generate(prompts * 8, GREEDY, progress=False)
    assert [a.text for a in together] == [a.text for a in alone] * 8
    for prompt, answer in zip(prompts, alone, strict=True):
        assert "".join(delta.text for delta in demo.stream(prompt, GREEDY)) == answer.text


def test_the_demo_after_an_interrupt(demo: LLM) -> None:
    endless = SamplingParams(temperature=0, ignore_eos=True)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        demo.generate(["Once upon a time"] * 500, endless, progress=False)
    stats = demo._llm.stats
    wait_until(lambda: stats.running == stats.waiting == stats.pages_held == 0)
    assert demo.generate("Once upon a time", GREEDY).usage.completion_tokens == 24


def test_the_exit_is_clean_while_the_demo_is_busy() -> None:
    program = """
import threading, time
from asyncllm import LLM, SamplingParams
llm = LLM(device="cpu", cpu_threads=1)
work = (["Once"] * 300, SamplingParams(ignore_eos=True))
threading.Thread(target=llm.generate, args=work, kwargs={"progress": False}, daemon=True).start()
time.sleep(0.5)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
