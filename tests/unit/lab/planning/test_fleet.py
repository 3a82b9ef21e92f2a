"""Replicas in simulated time: what routing keeps of the prefix cache, and what deaths cost."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from asyncllm import demo
from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.executor.sim.executor import resolve_sim
from asyncllm.lab.planning.chats import ChatLoad
from asyncllm.lab.planning.fleet import Fleet, FleetFigures
from asyncllm.models.spec import read_spec

LOAD = ChatLoad(rate=2.0, seconds=12.0, answer=(20, 60), think=4.0)


def fleet(replicas: int, **options: Any) -> Fleet:
    config = EngineConfig(device="sim", sim_profile="h200-0.6b")
    limits, cost = resolve_sim(config, read_spec(demo.path()))
    assert cost.profile is not None
    return Fleet(replicas=replicas, limits=limits, cost=cost, host=cost.profile.host, **options)


def computed_all(figures: FleetFigures) -> bool:
    return figures.found <= figures.findable and figures.ttft_p50 is not None


def test_one_replica_finds_all_that_can_be_found() -> None:
    figures = fleet(1).serve(LOAD)
    assert figures.found == figures.findable > 0.8
    assert (figures.token_imbalance, figures.request_imbalance) == (1.0, 1.0)
    assert figures.chats > 10
    assert figures.requests > 2 * figures.chats


def test_routing_by_prefix_keeps_chats_where_their_pages_are() -> None:
    found = {name: fleet(4, routing=name).serve(LOAD) for name in ("affinity", "least", "random")}
    one = fleet(1).serve(LOAD)
    assert all(map(computed_all, found.values()))
    assert found["affinity"].found > 0.9 * one.found
    assert found["affinity"].found > 1.2 * max(found["least"].found, found["random"].found)
    assert all(f.requests == one.requests and f.deaths == 0 for f in found.values())


def test_every_chat_ends_though_replicas_die() -> None:
    busy = msgspec.structs.replace(LOAD, rate=20.0, seconds=2.0, user=(2000, 3000), turns=(2, 3))
    deaths = [(0.5 + 0.2 * i, i % 3) for i in range(8)]
    first, again = (fleet(3, restart_seconds=0.4).serve(busy, deaths) for _ in range(2))
    assert first == again
    assert first.deaths == 8
    assert first.moved > 0, "prompts that were being computed"
    assert first.broken > 0
    calm = fleet(3).serve(busy)
    assert calm.requests == first.requests, "who is asked again is counted once"
    assert calm.found > first.found
    # Nobody is there for a while.
    gone = fleet(2, restart_seconds=5.0).serve(LOAD, [(3.0, 0), (3.0, 1), (3.5, 1)])
    assert gone.deaths == 2, "who is dead cannot die"
    assert gone.ttft_p99 is not None
    assert gone.ttft_p99 > 1.0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--replicas", "2", "--sim-profile", "h200-0.6b", "--seconds", "4", "--think", "1"]
    assert main(["bench", "fleet", *small, "--kill-every", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 replicas (h200-0.6b)" in printed
    assert "2 deaths" in printed
    assert "100.0 %" in next(line for line in printed.splitlines() if line.startswith("one rep"))
    assert main(["bench", "fleet", *small, "--routing", "affinity", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() == {"affinity", "one"}
    for options in (["--routing", "prefix"], ["--turns", "9-2"], ["--user", "90000"]):
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "fleet", *options])
    assert "--routing: 'prefix' is none of" in (error := capsys.readouterr().err)
    assert "'9-2' is no number, nor a range" in error
    assert "a chat may come to" in error
