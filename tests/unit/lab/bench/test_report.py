"""Files of figures: written, read, compared, printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncllm.engine.stats import StepFigures
from asyncllm.errors import BadRequest
from asyncllm.lab.bench import tables
from asyncllm.lab.bench.report import Earlier, OfflineRow, OnlineRow, Report, decode_report

ENGINE = StepFigures(
    seconds=1.0,
    steps=1000,
    busy_share=0.97,
    launch_gap_us=(3.25, 9.5),
    result_lag_ms=(0.125, 4.0),
    plan_us=34.0,
    apply_us=20.0,
    deliver_us=50.0,
    launch_us=60.0,
    collect_us=7.0,
    loop_share=0.42,
)


def offline(case: str = "bs8", tok_s: float = 6000.0) -> OfflineRow:
    return OfflineRow(
        case=case,
        seconds=[3.0, 0.4, 0.5],
        in_tokens=1024,
        out_tokens=2048,
        tok_s=tok_s,
        ms_per_token=1.5,
        ttft_ms=12.0,
        engine=ENGINE,
    )


def online(case: str = "c32", clients: int | None = 32, **values: Any) -> OnlineRow:
    row: dict[str, Any] = {
        "case": case,
        "requests": 128,
        "failed": 0,
        "seconds": 2.0,
        "tok_s": 16_000.0,
        "ttft_p50": 20.0,
        "ttft_p99": 50.0,
        "tpot_p50": 1.9,
        "itl_p50": 2.0,
        "itl_p99": 8.0,
        "itl_max": 30.0,
        "client_busy": 0.11,
        "clients": clients,
    }
    return OnlineRow(**{**row, **values})


def report(**parts: Any) -> Report:
    return Report(machine="NVIDIA H200", model="Qwen/Qwen3-0.6B", start_s=4.5, **parts)


PEERS = {
    "hardware": "1x NVIDIA H200",
    "offline": [
        {"engine": "vllm", "model": "Qwen3-0.6B", "case": "bs8", "s": [1, 2], "out_tok_s": 3000.0},
        {"engine": "mini", "model": "Qwen3-0.6B", "case": "bs8", "out_tok_s": 4000.0},
        {"engine": "mini", "model": "Qwen3-8B", "case": "bs8", "out_tok_s": 1419.7},
    ],
    "online_vllm": {
        "Qwen3-0.6B": {
            "start_s": 222,
            "c32": {"tok_s": 8000, "ttft_p99": 150, "itl_p99": 24.0},
            "interfere32": {"tok_s": 9790, "long_ttft_p50": 69.5},
        }
    },
    "start_s": {"vllm": {"cold": 215.6}},
}


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(PEERS))
    return path


# -- files -----------------------------------------------------------------------------------------


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = report(offline=[offline()], online=[online()], settings={"policy": "longest"})
    path = tmp_path / "out.json"
    written.write(path)
    assert decode_report(path.read_bytes(), path) == written
    assert json.loads(path.read_text())["offline"][0]["engine"]["launch_gap_us"] == [3.25, 9.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"a": ', "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b"{}", "no figures"),
        (b'{"asyncllm": "0.1.0"}', "not a file of asyncllm bench.*`machine`"),
        (b'{"asyncllm": "1", "machine": "m", "model": "m", "offline": [{}]}', r"offline\[0\]"),
        (b'{"offline": [{"engine": "x", "case": "bs1", "out_tok_s": 1}]}', "table of peers.*model"),
        (b'{"offline": 3}', "not a table of peers"),
        (b'{"online_x": {"m": {"c1": {"tok_s": "fast"}}}}', "not a table of peers"),
        (b'{"online_x": {"m": 3}}', "not a table of peers"),
    ],
)
def test_malformed_files_say_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=message) as caught:
        Earlier.read(path)
    assert "bad.json" in str(caught.value)


# -- comparing -------------------------------------------------------------------------------------


def test_the_best_peer_of_each_case(peers: Path) -> None:
    earlier = Earlier.read(peers).select("/models/Qwen3-0.6B")
    compared = earlier.compare(report(offline=[offline(), offline("bs1")], online=[online()]))
    assert [(c.case, c.metric, c.theirs, c.engine) for c in compared] == [
        ("bs8", "tok_s", 4000.0, "mini"),
        ("c32", "tok_s", 8000.0, "vllm"),
        ("c32", "ttft_p99", 150.0, "vllm"),
        ("c32", "itl_p99", 24.0, "vllm"),
        ("start", "start_s", 222.0, "vllm"),
    ]
    # More tokens are better, more milliseconds are not.
    assert [c.ratio for c in compared] == pytest.approx([1.5, 2.0, 3.0, 3.0, 222 / 4.5])
    assert "1.50" in tables.comparison_table(compared)


def test_a_peer_by_name(peers: Path) -> None:
    earlier = Earlier.read(peers)
    [one] = earlier.select("Qwen3-0.6B", "vllm").compare(report(offline=[offline()]))
    assert (one.engine, one.ratio) == ("vllm", 2.0)
    assert len(earlier.select("Qwen/Qwen3-8B").figures) == 1


def test_missing_models_and_engines_are_named(peers: Path) -> None:
    earlier = Earlier.read(peers)
    with pytest.raises(BadRequest, match=r"figures of Qwen3-0\.6B, Qwen3-8B; not of Qwen3-14B"):
        earlier.select("Qwen/Qwen3-14B")
    with pytest.raises(BadRequest, match="figures of mini, vllm; not of sglang"):
        earlier.select("Qwen3-0.6B", "sglang")
    only_long = online("interfere32", None, long_ttft_p50=139.0, itl_p99=None)
    compared = earlier.select("Qwen3-0.6B").compare(report(online=[only_long]))
    assert [c.metric for c in compared] == ["tok_s", "long_ttft_p50", "start_s"]
    assert compared[1].ratio == 0.5


def test_comparing_with_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    report(offline=[offline(tok_s=5000.0)], online=[online(itl_max=None)]).write(path)
    earlier = Earlier.read(path).select("Qwen3-0.6B")
    compared = earlier.compare(report(offline=[offline()], online=[online()]))
    ratios = {(c.case, c.metric): c.ratio for c in compared}
    assert ratios["bs8", "tok_s"] == 1.2
    assert ratios["bs8", "ttft_ms"] == 1.0
    assert ("c32", "itl_max") not in ratios
    assert {c.engine for c in compared} == {"asyncllm"}
    assert earlier.compare(report(offline=[offline("bs1")])) == [], "its start was a server's"


# -- tables ----------------------------------------------------------------------------------------


def test_tables_line_up() -> None:
    rows = [offline(), offline("prefill16x2k", 190.123)]
    lines = tables.offline_table(rows).splitlines()[:3]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["bs8", "1,024", "2,048", "0.400", "6,000.0", "1.500", "12.0"]
    text = tables.online_table([online(), online("i", None, long_ttft_p50=70.0, ttft_p50=None)])
    assert [len(line.split()) for line in text.splitlines()[1:4]] == [12, 12, 4]
    assert "11%" in text
    engine = tables.engine_table([("bs8", ENGINE), ("other", None)])
    assert engine.splitlines()[1].split()[:7] == [
        *("bs8", "1,000", "97.0%", "3.2", "9.5", "0.125", "4.000")
    ]
    assert engine.splitlines()[1].endswith("42%")
    assert tables.engine_table([("other", None)]) == ""
    drafted = msgspec.structs.replace(ENGINE, drafts=200, drafted=1600, drafted_right=500)
    drafts = tables.drafts_table([("bs1", drafted), ("bs8", ENGINE), ("other", None)])
    assert [line.split() for line in drafts.splitlines()[1:3]] == [
        ["bs1", "200", "1,600", "500", "31%", "3.50"],
        ["bs8", "0", "0", "0", "0%", "-"],
    ]
    assert tables.drafts_table([("bs8", ENGINE)], synthetic=True) == ""
    assert "started in 4.5 s: policy longest" in tables.header(
        report(settings={"policy": "longest"})
    )


def test_tables_fit_a_terminal_and_explain_themselves() -> None:
    times: dict[str, Any] = dict.fromkeys(
        ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99"), 123456.78
    )
    row = online(
        "interfere32",
        requests=2000,
        failed=2000,
        seconds=1234.56,
        itl_max=99_999.9,
        long_ttft_p50=3.0,
        **times,
    )
    slow = msgspec.structs.replace(
        ENGINE,
        steps=1_234_567,
        launch_gap_us=(12_345.6, 12_345.6),
        result_lag_ms=(1234.5678, 9876.5432),
        **dict.fromkeys(("plan_us", "apply_us", "deliver_us", "launch_us", "collect_us"), 12_345.6),
    )
    row.engine = slow
    settings = {f"a long name of setting {i}": "and its value" for i in range(9)}
    text = tables.whole(
        report(offline=[offline("prefill16x2k", 1e6)], online=[row], settings=settings), None
    )
    assert [line for line in text.splitlines() if len(line) > 100] == []
    for name in ("TTFT, from sending", "TPOT, a request", "lag: ms from a result", "seconds: of"):
        assert name in " ".join(text.split())
