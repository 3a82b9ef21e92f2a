"""Errors and Ctrl-C in a program of the user's own: only the program's own frames are shown."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, SamplingParams
from asyncllm.errors import BadRequest, ModelError
from asyncllm.llm.brief_errors import brief

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def own_frames(error: BaseException) -> list[str]:
    """Of all that is printed of an error, the lines that name a file of the package."""
    lines = traceback.format_exception(error)
    assert error.__cause__ is None
    return [line for line in lines if "/asyncllm/" in line and "/tests/" not in line]


@pytest.fixture
def llm() -> Any:
    with LLM(device="sim") as llm:
        yield llm


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError) as caught:
        LLM("./no-such-model")
    assert own_frames(caught.value) == []
    for kind in (LLM, AsyncLLM):
        with pytest.raises(BadRequest) as refused:
            kind(max_num_seqs=0)
        assert own_frames(refused.value) == []


async def test_in_an_asyncio_program() -> None:
    with pytest.raises(ModelError) as caught:
        async with AsyncLLM("./no-such-model"):
            pass
    assert own_frames(caught.value) == []
    async with AsyncLLM(device="sim") as llm:
        with pytest.raises(BadRequest) as refused:
            await llm.generate([1] * 10**6)
        assert own_frames(refused.value) == []
        with pytest.raises(BadRequest) as refused:
            async for _ in llm.stream([1] * 10**6):
                pass
        assert own_frames(refused.value) == []


@pytest.mark.parametrize("way", ["generate", "one", "stream", "embed"])
def test_ctrl_c(llm: LLM, way: str) -> None:
    def work() -> None:
        match way:
            case "generate":
                llm.generate(["a"] * 1000, LONG, progress=False)
            case "one":
                while True:
                    llm.generate("a", LONG)
            case "stream":
                while True:
                    list(llm.stream("a", LONG))
            case _:
                while True:
                    llm.embed(["a"] * 100)

    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    interrupt.join()
    assert own_frames(caught.value) == []


@pytest.mark.parametrize("streams", [False, True])
def test_ctrl_c_under_asyncio(streams: bool) -> None:
    async def main() -> None:
        async with AsyncLLM(device="sim") as llm:
            interrupt.start()
            while True:
                if streams:
                    async for _ in llm.stream("a", LONG):
                        pass
                else:
                    await llm.generate("a", LONG)

    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(main())
    interrupt.join()
    # Printed with what it came from, the cancelled task.
    assert own_frames(caught.value) == []


def test_a_bug_keeps_its_frames() -> None:
    @brief
    def method() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        method()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "method"
