"""``asyncllm bench offline`` with the demo model on the CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm import AsyncLLM, __version__
from asyncllm.__main__ import main
from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import OfflineCase, fixed, uneven
from asyncllm.lab.bench.offline import run_case
from asyncllm.lab.bench.report import decode_report

TINY = (
    OfflineCase("bs1", fixed(1, 6, 12, 100)),
    OfflineCase("bs8", fixed(8, 40, 6, 200)),
    OfflineCase("prefill8k", fixed(1, 8000, 1, 500)),
    OfflineCase("uneven", uneven(5, (10, 60), 0), temperature=0.6),
)
CPU = ("--device", "cpu", "--cpu-threads", "1")


@pytest.fixture(autouse=True)
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cases, "OFFLINE", TINY)
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, peers = tmp_path / "out.json", tmp_path / "peers.json"
    row = {"engine": "slow", "model": "asyncllm-demo", "case": "bs1", "out_tok_s": 0.001}
    peers.write_text(json.dumps({"offline": [row]}))
    args = ["bench", "offline", *CPU, "--cases", "bs1,bs8,prefill8k,uneven"]
    assert main([*args, "--json", str(out), "--compare", str(peers)]) == 0
    report = decode_report(out.read_bytes(), out)
    assert (report.asyncllm, report.model) == (__version__, "asyncllm-demo")
    assert report.settings["policy"] == "longest"
    assert [row.case for row in report.offline] == ["bs1", "bs8", "uneven"]
    for found in report.offline:
        assert len(found.seconds) == 3
        best = min(found.seconds[1:])
        assert found.tok_s == pytest.approx(found.out_tokens / best)
        assert 0 < found.ttft_ms < 1e3 * best
        assert found.engine is not None
        assert 0 < found.engine.busy_share <= 1
        assert found.engine.plan_us > 0
        assert found.engine.result_lag_ms is not None
    assert (report.offline[0].in_tokens, report.offline[0].out_tokens) == (6, 12)
    assert report.offline[0].ms_per_token == pytest.approx(
        1e3 * min(report.offline[0].seconds[1:]) / 12
    )
    printed = capsys.readouterr()
    assert "prefill8k: skipped, the context is too short for it" in printed.err
    assert "policy longest" in printed.out
    assert "slow" in printed.out
    assert "ratios above 1 are better" in printed.out


def test_a_cpu_runs_small_cases_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = sum(sum(case.make(0).max_tokens) for case in cases.OFFLINE_CPU)
    assert tokens < 300, "seconds with the demo, and about a minute with a model of 0.6B"
    assert main(["bench", "offline", *CPU]) == 0
    printed = capsys.readouterr()
    assert "on a CPU, two small cases are run; for all: --cases bs1,bs8," in printed.err
    names = [line.rpartition(" ")[0] for line in printed.err.splitlines() if "tok/s" in line]
    assert [case.name in " ".join(names) for case in cases.OFFLINE_CPU] == [True, True]
    assert "uneven: " not in printed.err


def test_chosen_cases_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", *CPU, "--cases", "uneven,bs1", "--policy", "fcfs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "policy fcfs" in lines[1]
    assert [line.split()[0] for line in lines if line[:3] in ("bs1", "une")] == [
        *("uneven", "bs1", "uneven", "bs1")
    ]
    with pytest.raises(SystemExit):
        main(["bench", "offline", *CPU, "--cases", "c256"])
    assert "no case 'c256' among bs1" in capsys.readouterr().err


def test_synthetic_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "offline", *CPU, "--synthetic-acceptance", "3"]
    lengths = ["--input-len", "8", "--output-len", "60", "--num-prompts", "1"]
    assert main([*args, *lengths, "--load-format", "dummy", "--max-model-len", "80"]) == 0
    printed = capsys.readouterr()
    assert "speculative_config {'synthetic_acceptance': 3.0}" in " ".join(printed.out.split())
    assert "synthetic acceptance: chance decided what was right" in printed.out
    with pytest.raises(SystemExit):
        main(args)
    assert "synthetic_acceptance needs --load-format dummy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--url", "http://localhost:1", "--synthetic-acceptance", "2"])
    assert "the server at --url decides" in capsys.readouterr().err


def test_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", *CPU, "--cases", "prefill8k"]) == 1
    assert "skipped" in capsys.readouterr().err


async def test_no_repetition_finds_prefixes_of_another() -> None:
    case = OfflineCase("same", uneven(3, (64, 100), 0))
    assert case.make(0) == case.make(1)
    async with AsyncLLM(device="cpu", cpu_threads=1) as llm:
        await run_case(llm, case)
        row = await run_case(llm, case)
        assert llm.stats.cached_tokens == 0
        assert llm.stats.prompt_tokens > 0
        assert row is not None
        assert row.engine is not None
        assert row.engine.steps <= llm.stats.steps / 4
        assert llm.stats.running == llm.stats.waiting == 0


def test_given_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm.system.terminal.LINE_SECONDS", 0.0)
    monkeypatch.setattr("asyncllm.lab.bench.offline.WATCH_SECONDS", 0.05)
    path, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    sum_ = {"messages": [{"role": "user", "content": "What is 27 + 45?"}], "arrival": 0}
    tale = {"prompt": "Once upon a time", "max_tokens": 40, "arrival": 1.5}
    path.write_text(f"{json.dumps(sum_)}\n{json.dumps(tale)}\n")
    args = ["bench", "offline", *CPU, "--prompts", str(path), "--output-len", "60"]
    assert main([*args, "--json", str(out)]) == 0
    [row] = decode_report(out.read_bytes(), out).offline
    assert row.case == "prompts"
    assert 40 < row.out_tokens < 60, "the sum ends by itself"
    printed = capsys.readouterr().err
    assert "their arrival is ignored" in printed
    assert "prompts: " in printed
    assert "of 300 tokens" in printed, "three repetitions, on the way"


def test_given_lengths(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ["bench", "offline", *CPU, "--input-len", "9", "--output-len", "3", "--num-prompts", "2"]
    assert main([*args, "--json", str(out)]) == 0
    report = decode_report(out.read_bytes(), out)
    assert [(row.in_tokens, row.out_tokens) for row in report.offline] == [(18, 6)]
    assert report.machine
    assert report.created.startswith(time.strftime("%Y-"))


def test_a_prompt_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hi"}\n\n{"prompt": "hi", "max_tokens": 4000}\n')
    assert main(["bench", "offline", *CPU, "--prompts", str(path)]) == 1
    assert "p.jsonl: line 3: 2 prompt tokens and 4000 to generate exceed" in capsys.readouterr().err
