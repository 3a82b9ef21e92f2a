"""Predicted times against those that were measured over HTTP, on one H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.executor import resolve_sim
from asyncllm.executor.sim.profile import shipped
from asyncllm.lab.planning.cost import (
    CROSSING_SECONDS,
    MEASURED,
    PUSHED,
    PUSHED_KIB,
    PredictedCost,
    all_reduce_seconds,
)
from asyncllm.lab.planning.gpus import GPUS
from asyncllm.lab.planning.load import LoadPlan
from asyncllm.lab.planning.predict import Prediction, predict, share_of
from asyncllm.lab.planning.rank import RankModel, rank_model
from asyncllm.models.spec import read_spec
from tests.support.models.configs import QWEN3_06B, QWEN3_8B, config_folder

H200 = GPUS["h200"]
OF_PROFILE = {"h200-0.6b": QWEN3_06B, "h200-8b": QWEN3_8B}


def model_of(folder: Path, profile: str, tp: int = 1) -> tuple[RankModel, EngineLimits]:
    """A model that was measured, and the limits of its engine."""
    spec = read_spec(config_folder(folder, OF_PROFILE[profile]))
    limits, _ = resolve_sim(EngineConfig(device="sim", sim_profile=profile), spec)
    return rank_model(EngineConfig(tp=tp), spec, H200.for_kernels), limits


def measured(profile: str, case: str) -> dict[str, Any]:
    rows = [row for report in shipped(profile).measured for row in report["online"]]
    return next(row for row in rows if row["case"] == case)


def ratios(found: Prediction, row: dict[str, Any]) -> dict[str, float]:
    """Predicted to measured."""
    times = ("ttft_p50", "ttft_p99", "itl_p99", "tpot_p50")
    return {name: 1e3 * getattr(found, name) / row[name] for name in times} | {
        "tok_s": found.tokens_per_second / row["tok_s"]
    }


@pytest.mark.parametrize("profile", MEASURED)
def test_a_measured_model_is_predicted_as_it_was_measured(profile: str, tmp_path: Path) -> None:
    rank, limits = model_of(tmp_path, profile)
    cost = PredictedCost(rank, H200, 1)
    assert cost.is_measured
    assert not PredictedCost(rank, GPUS["h100"], 1).is_measured
    found = ratios(predict(LoadPlan.parse("c32"), limits, cost, "fair"), measured(profile, "c32"))
    assert found.pop("tok_s") == pytest.approx(1.0, abs=0.04)
    assert found.pop("tpot_p50") == pytest.approx(1.0, abs=0.04)
    assert found.pop("ttft_p50") == pytest.approx(1.0, abs=0.12)
    assert all(0.75 < ratio < 1.25 for ratio in found.values())


@pytest.mark.parametrize("profile", MEASURED)
def test_one_measured_model_tells_the_other(profile: str, tmp_path: Path) -> None:
    """As well as ``planning.plan`` says to users."""
    rank, limits = model_of(tmp_path, profile)
    other = [name for name in MEASURED if name != profile]
    cost = PredictedCost(rank, H200, 1, other)
    found = ratios(predict(LoadPlan.parse("c32"), limits, cost, "fair"), measured(profile, "c32"))
    assert found["tok_s"] == pytest.approx(1.0, abs=0.06)
    assert found["tpot_p50"] == pytest.approx(1.0, abs=0.07)
    assert found["ttft_p50"] == pytest.approx(1.0, abs=0.16)


def test_sums_over_ranks_are_added(tmp_path: Path) -> None:
    rank, _ = model_of(tmp_path, "h200-8b", tp=2)
    cost = PredictedCost(rank, H200, 2)
    assert cost.rank_seconds(1, 0) == pytest.approx(73 * 1.7e-6 + 1.7e-6), "of 8 KiB each"
    assert cost.rank_seconds(8192, 1) > 10 * cost.rank_seconds(1, 1)
    measured = 1 / 424.0, 1 / 3223 * 8
    for rows, seconds in zip((1, 8), measured, strict=True):
        step = np.full(rows, 384), np.ones(rows, dtype=np.int64), rows
        assert 0.92 < cost.seconds(*step) / seconds < 0.97, "as well as planning.plan says"


def test_sums_as_measured_and_beyond() -> None:
    assert all_reduce_seconds(H200, 1, 1e6) == 0.0
    for kib, microseconds in zip(PUSHED_KIB, PUSHED, strict=True):
        assert all_reduce_seconds(H200, 2, 1024 * kib) == pytest.approx(1e-6 * microseconds)
    # Four ranks push 4 MiB in two shots, each 6 MiB.
    slope = (PUSHED[-1] - PUSHED[-2]) / (PUSHED_KIB[-1] - PUSHED_KIB[-2])
    pushed = 1e-6 * (PUSHED[-2] + slope * (6144 - PUSHED_KIB[-2]))
    assert all_reduce_seconds(H200, 4, 4 << 20) == pytest.approx(CROSSING_SECONDS + pushed)
    for gpu in (H200, GPUS["a100-80"], GPUS["l40s"]):
        by_tp = [all_reduce_seconds(gpu, tp, 1e6) for tp in (1, 2, 4, 8)]
        by_size = [all_reduce_seconds(gpu, 4, size) for size in (1e3, 1e6, 1e7, 1e8)]
        assert (by_tp, by_size) == (sorted(by_tp), sorted(by_size))


def test_loads(tmp_path: Path) -> None:
    rank, limits = model_of(tmp_path, "h200-8b")
    cost = PredictedCost(rank, H200, 1)

    def of(text: str, dp: int = 1) -> Prediction:
        return predict(LoadPlan.parse(text), limits, cost, "fair", dp)

    sizes = "input=800,output=20"
    idle, busy = of(f"rate=2,{sizes}"), of(f"rate=100,{sizes},requests=150")
    assert not idle.is_growing
    assert busy.is_growing, "20 prompts of 800 a second are as much as it can do"
    assert idle.requests_per_second == pytest.approx(2, rel=0.15)
    assert busy.requests_per_second < 60
    shared = of(f"rate=100,{sizes},requests=150,prefix=640")
    assert shared.cached_share > 0.7
    assert shared.requests_per_second > 1.5 * busy.requests_per_second
    replicas = of(f"rate=100,{sizes},requests=400", dp=4)
    assert replicas.requests == 400
    assert replicas.tokens_per_second > 1.5 * busy.tokens_per_second
    with pytest.raises(BadRequest, match=r"41,000 tokens, and the longest context .* is 40,960"):
        of("concurrency=1,input=40000,output=1000")


def test_replicas_share_a_load() -> None:
    case = LoadPlan.parse("concurrency=10,input=5,output=5,requests=100").case
    assert case is not None
    part = share_of(case, 4)
    assert (part.clients, len(part.shots)) == (3, 25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate=1,input=5", "output is missing"),
        ("input=5,output=5", "either rate or concurrency"),
        ("rate=1,concurrency=2,input=5,output=5", "either rate or concurrency"),
        ("rate=0,input=5,output=5", "rate must be a number above 0, not '0'"),
        ("rate=1,input=x,output=5", "input must be tokens"),
        ("rate=1,input=9-5,output=5", "the wrong way round"),
        ("rate=1,rate=2,input=5,output=5", "given twice"),
        ("rate=1,inptu=5,output=5", "did you mean input"),
        ("rate=1,input=5,output=5,prefix=5", "prefix 5 must be less than input 5"),
        ("c33", "did you mean c32"),
    ],
)
def test_a_wrong_load(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        LoadPlan.parse(text)
