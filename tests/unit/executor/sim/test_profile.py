"""Profiles: measured step times, and what is said about a file that is none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest, ModelError
from asyncllm.executor.sim.cost import H200, SimCost
from asyncllm.executor.sim.profile import Curve, StepShape, find_profile, load, shipped
from asyncllm.executor.sim.shape import SHAPES

NAMES = ("h200-8b", "h200-0.6b", "h200-30b-a3b")


def shape(rows: list[tuple[int, int]]) -> StepShape:
    starts, lengths = np.array(rows, dtype=np.int64).T
    return StepShape.of(starts, lengths, len(rows))


@pytest.mark.parametrize("name", NAMES)
def test_no_step_is_faster_with_more_to_do(name: str) -> None:
    times = shipped(name).steps
    decode = [times.seconds(shape([(500, 1)] * rows)) for rows in range(1, 257)]
    assert decode == sorted(decode)
    prompts = [times.seconds(shape([(0, tokens)])) for tokens in range(2, 8192, 50)]
    assert prompts == sorted(prompts)
    chunks = [times.seconds(shape([(700, 1)] * 8 + [(at, 256)])) for at in range(0, 9000, 500)]
    assert chunks == sorted(chunks)


@pytest.mark.parametrize("name", NAMES)
def test_beyond_what_was_measured_steps_grow_as_the_roofline_does(name: str) -> None:
    cost = SimCost(SHAPES[name], H200, itemsize=2, profile=shipped(name))
    roofline = SimCost(SHAPES[name], H200, itemsize=2)

    def ratio(some: SimCost, rows: int) -> float:
        starts, ones = np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
        return some.seconds(starts, ones, rows) / some.seconds(starts[:256], ones[:256], 256)

    assert ratio(cost, 2048) == pytest.approx(ratio(roofline, 2048), rel=0.05)


def test_several_decode_steps_take_as_long_as_so_many_steps_but_are_launched_once() -> None:
    times = shipped("h200-0.6b").steps
    one_by_one = [times.seconds(shape([(100 + i, 1)] * 4)) for i in range(4)]
    together = times.seconds(shape([(100, 1)] * 4), decode_steps=4)
    assert together == pytest.approx(sum(one_by_one) - 4 * times.launch)


def test_equal_steps_of_a_class_differ_as_the_measured_ones_do() -> None:
    profile = shipped("h200-0.6b")
    kind = profile.kinds[0]
    ratios = [profile.ratio(kind.name, step) for step in range(1000)]
    assert ratios == [profile.ratio(kind.name, step) for step in range(1000)]
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(ratios, share) == pytest.approx(
            np.quantile(kind.ratios, share), rel=0.01
        )
    assert profile.ratio("of another class", 7) == 1.0
    assert profile.gap("of another class") == 0.0


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([(5, 1)], "decode, 1 rows"),
        ([(5, 1)] * 9, "decode, 9-32 rows"),
        ([(0, 512)], "prompts, 129-512 tokens"),
        ([(7, 1), (0, 512)], "mixed, 513-2048 tokens"),
    ],
)
def test_the_class_of_a_step(rows: list[tuple[int, int]], kind: str) -> None:
    assert shape(rows).kind == kind


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = shipped("h200-8b")
    profile.write(tmp_path / "own.json")
    assert find_profile(str(tmp_path / "own.json")) == profile
    assert find_profile("auto") is None


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the profile"):
        load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"format": 1}')
    with pytest.raises(ModelError, match="not a profile"):
        load(tmp_path / "other.json")
    newer = msgspec.structs.replace(shipped("h200-8b"), format=2)
    newer.write(tmp_path / "newer.json")
    with pytest.raises(ModelError, match="has format 2"):
        load(tmp_path / "newer.json")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("launch", -1.0, "host.launch"),
        ("token", -1e-6, "host.token"),
        ("idle", {"at": [], "values": []}, "a curve needs points"),
        ("idle", {"at": [1, 2], "values": [0.1]}, "a curve needs points"),
    ],
)
def test_times_that_cannot_be_are_refused(
    field: str, value: object, named: str, tmp_path: Path
) -> None:
    raw = msgspec.to_builtins(shipped("h200-8b"))
    raw["host"][field] = value
    (tmp_path / "odd.json").write_bytes(msgspec.json.encode(raw))
    with pytest.raises(ModelError, match=named):
        load(tmp_path / "odd.json")


def test_the_name_of_a_profile_is_checked_before_anything_is_loaded() -> None:
    EngineConfig(sim_profile="mine.json")
    with pytest.raises(BadRequest, match="sim_profile must be auto, h200-8b"):
        EngineConfig(sim_profile="h100")


def test_a_curve_is_flat_outside_its_points() -> None:
    curve = Curve((1, 3), (10.0, 20.0))
    assert [curve(x) for x in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]
    assert curve.of(np.array([2, 9])).tolist() == [15, 20]
    assert curve.extended(lambda n: n * n)(6) == 80
