"""Rank 0 in a process of its own: what crosses besides plans and results, and how it fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asyncllm import AsyncLLM, BadRequest, SamplingParams
from asyncllm.errors import EngineDead, ModelError, StepError
from asyncllm.executor.process.reports import Failed
from asyncllm.text.grammar import JsonSchema, Regex
from asyncllm.types import Reasoning
from tests.cpu.llm.test_library import until
from tests.support.team.ranks import executors, plant

T = TypeVar("T")

FIELDS: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "executor": "process"}


def test_loading_is_told_and_the_server_needs_no_torch() -> None:
    """In a process that has imported nothing."""
    program = f"""
        import asyncio, sys
        from asyncllm import AsyncLLM, SamplingParams
        seen = []
        async def main():
            async with AsyncLLM(progress=lambda *each: seen.append(each), **{FIELDS!r}) as llm:
                greedy = SamplingParams(max_tokens=4, temperature=0.0)
                answer = await llm.generate("1, 2, 3,", greedy)
                assert answer.text.startswith(" 4, "), answer
                assert llm.vitals.heartbeat.operation.since > 0
                print(*[item.name for item in llm.startup.items], sep=",")
        asyncio.run(main())
        assert seen[-1][0] == seen[-1][1] > 0, seen
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    assert done.stdout == "import,device,weights,kernels,profile,KV cache,attention,graphs\n"


@pytest.mark.parametrize("options", [{"executor": "process"}, {"dp": 2}])
def test_a_loop_may_be_run_by_one_thread_after_another(options: dict[str, Any]) -> None:
    llm = AsyncLLM(device="cpu", cpu_threads=1, **options)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    with asyncio.Runner() as runner:

        def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(lambda: runner.run(work())).result()

        run(llm.start)
        try:
            assert run(lambda: llm.generate("1, 2, 3,", greedy)).text.startswith(" 4, ")
        finally:
            run(llm.aclose)
    assert executors() == []


async def test_loading_can_be_cancelled() -> None:
    llm = AsyncLLM(**FIELDS)
    starting = asyncio.create_task(llm.start())
    await until(lambda: bool(executors()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert executors() == []
    await llm.aclose()


async def test_an_unexpected_error_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plant("import asyncllm.models.spec as spec\nspec.read_spec = None", tmp_path, monkeypatch)
    with pytest.raises(EngineDead, match=r"the executor failed: TypeError.*its log has the trace"):
        await AsyncLLM(**FIELDS).start()
    assert "[rank 0] __main__: the executor ends" in (log := capfd.readouterr().err)
    assert "TypeError: 'NoneType' object is not callable" in log
    assert executors() == []


async def test_requests_of_all_kinds_beside_one_that_makes_steps_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        """
        from tests.support.server.serve_faulty import plant
        plant()
        """,
        tmp_path,
        monkeypatch,
    )
    poison = [5, 2000, 7]  # of ``serve_faulty``
    async with AsyncLLM(**FIELDS) as llm:
        with pytest.raises(BadRequest, match="'type' must name JSON types") as refused:
            await llm.prepare(SamplingParams(grammar=JsonSchema({"type": "planted"})))
        assert refused.value.param == "grammar"
        [closing] = llm.tokenizer.encode(")", add_special_tokens=False)
        reasoning = Reasoning(is_open=True, end_texts=(")",), closing_ids=(closing,), max_tokens=3)
        bad, reasoned, *letters = await asyncio.gather(
            llm.generate(poison, SamplingParams(max_tokens=9)),
            llm.generate("The", SamplingParams(reasoning=reasoning, max_tokens=9)),
            *(llm.generate("The", SamplingParams(grammar=Regex(f"{c}{{5}}"))) for c in "abcdef"),
            return_exceptions=True,
        )
        assert isinstance(bad, StepError)
        assert not isinstance(reasoned, BaseException)
        assert closing in reasoned.token_ids[:4]
        texts = [each.text for each in letters if not isinstance(each, BaseException)]
        assert texts == [c * 5 for c in "abcdef"]
        await until(lambda: llm.stats.pages_held == 0)  # a row may be in flight behind an end


@pytest.mark.parametrize(
    ("error", "loading", "serving"),
    [
        (ModelError("why", param="dtype"), "why", "the executor died; its log has the cause"),
        (EngineDead("lost"), "lost", "lost"),
        (ValueError("odd"), "odd", "the executor died; its log has the cause"),
    ],
)
def test_what_is_said_of_an_error(error: Exception, loading: str, serving: str) -> None:
    failed = Failed.of(error)
    assert loading in failed.loading_error().message
    assert isinstance(failed.loading_error(), ModelError) == isinstance(error, ModelError)
    assert failed.loading_error().param == getattr(error, "param", None)
    assert failed.serving_error().message == serving
