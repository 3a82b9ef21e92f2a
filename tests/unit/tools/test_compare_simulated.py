"""The simulated H200 against measured ones: the cases of the benchmark, row by row."""

from __future__ import annotations

import re
import sys

import pytest

from asyncllm.errors import BadRequest
from asyncllm.lab.bench import cases
from tools import compare_simulated
from tools.compare_simulated import Compared, compare, measured_rows, offline_rows, online_rows

PROFILES = ("h200-8b", "h200-0.6b")
OFFLINE = {case.name: case for case in cases.OFFLINE}
#: Largest |ratio - 1| by figure.
GOAL, P99_GOAL = 0.07, 0.25
#: Not held. With 256 clients of 8B, prompts come about as fast as they can be computed, so a few
#: percent decide how long they wait: the median was measured at 160, 179 and 193 ms. With 0.6B,
#: first tokens take a few ms, of which the host takes half; what it takes for a long prompt is not
#: in the profile.
MISSED = {
    "h200-8b": (("c256", "ttft_p50"),),
    "h200-0.6b": (
        ("bs1", "ttft_ms"),
        ("bs128", "ttft_ms"),
        ("prefill8k", "ttft_ms"),
        ("c32", "ttft_p50"),
        ("interfere32", "ttft_p50"),
        ("interfere32", "itl_p99"),
        ("interfere32", "long_ttft_p50"),
    ),
}


def worst(compared: list[Compared], *but: tuple[str, str]) -> list[Compared]:
    """Those that miss the goal, except the named ones."""
    return [
        one
        for one in compared
        if abs(one.ratio - 1) > (P99_GOAL if one.metric.endswith("p99") else GOAL)
        and (one.case, one.metric) not in but
    ]


@pytest.mark.parametrize("profile", PROFILES)
def test_small_offline_cases_run_at_the_measured_speed(profile: str) -> None:
    wanted = [OFFLINE[name] for name in ("bs1", "bs8", "prefill8k", "prefill16x2k")]
    compared = compare(measured_rows(profile), offline_rows(profile, wanted))
    assert len(compared) == 8
    assert not worst(compared, *MISSED[profile])


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_all_offline_cases_run_at_the_measured_speed(profile: str) -> None:
    recorded = [case for case in cases.OFFLINE if case.name != "bs64"]  # is newer than profiles
    compared = compare(measured_rows(profile), offline_rows(profile, recorded))
    assert len(compared) == 2 * len(recorded)
    assert not worst(compared, *MISSED[profile])


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_online_cases_have_the_measured_latencies(profile: str) -> None:
    compared = compare(measured_rows(profile), online_rows(profile, cases.online()))
    assert len(compared) >= 30
    assert not worst(compared, *MISSED[profile])


def test_one_client_waits_as_long_as_measured() -> None:
    only = [case for case in cases.online() if case.name == "c1"]
    for profile in PROFILES:
        compared = compare(measured_rows(profile), online_rows(profile, only))
        assert {one.metric for one in compared} >= {"tok_s", "ttft_p50", "itl_p99"}
        assert not worst(compared, *MISSED[profile])


def test_the_script_prints_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_simulated", "--cases", "bs1", "prefill8k"])
    compare_simulated.main()
    found = capsys.readouterr().out
    assert re.search(r"prefill8k +tokens/s +4\.\d+ +4\.\d", found)


def test_what_was_not_measured_cannot_be_compared() -> None:
    with pytest.raises(BadRequest, match="auto has no measured rows"):
        measured_rows("auto")
    rows = measured_rows("h200-8b")
    assert compare([], rows) == []
