"""/health and /ready: the state of the server by the progress of its steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.server.native.health import health_of
from asyncllm.wire.heartbeat import Heartbeat
from tests.support.server.openapi import check
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def mortal() -> Iterator[Server]:
    with serving() as running:
        yield running


def service_of(**changes: Any) -> Any:
    llm: dict[str, Any] = {
        "vitals": SimpleNamespace(heartbeat=Heartbeat()),
        "healthy": True,
        "ready": True,
        "stats": SimpleNamespace(running=0, waiting=0),
    }
    draining = changes.pop("draining", False)
    return SimpleNamespace(llm=SimpleNamespace(**llm | changes), draining=draining)


def state(stall: str | None = None, **changes: Any) -> str:
    return health_of(service_of(**changes), stall).status


def test_states() -> None:
    assert state() == "idle"
    assert state(stats=SimpleNamespace(running=0, waiting=1)) == "ok"
    assert state(vitals=None, ready=False) == "loading"
    assert state(draining=True) == "draining"
    assert state(healthy=False, draining=True) == "dead"
    assert state("step 1 has made no progress", healthy=False) == "stalled"


def test_ages() -> None:
    service = service_of()
    heartbeat: Heartbeat = service.llm.vitals.heartbeat
    heartbeat.submitted(0)
    heartbeat.submitted(1)
    heartbeat.enter("launch", 1)
    heartbeat.finished()
    time.sleep(0.02)
    found = health_of(service, None)
    assert (found.status, found.steps_done, found.step) == ("ok", 1, 1)
    assert found.operation == "launch"
    for age in (found.last_step_age, found.step_age, found.operation_age):
        assert age is not None
        assert 0.02 <= age < 5
    heartbeat.finished()
    assert (health_of(service, None).step, health_of(service, None).step_age) == (None, None)


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_of_a_real_engine(demo: Server, path: str) -> None:
    demo.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    demo.until_idle()
    answer = demo.get(path)
    assert (answer.status, answer.json["status"]) == (200, "idle")
    assert answer.json["steps_done"] >= 3
    assert answer.json["last_step_age"] >= 0


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_dead(mortal: Server, document: dict[str, Any], path: str) -> None:
    mortal.call(lambda: mortal.llm.give_up("planted"))
    answer = mortal.get(path)
    assert (answer.status, answer.json["status"]) == (503, "dead")
    assert answer.json["error"]["code"] == "engine_dead"
    check(document, "GET", path, answer)
    assert mortal.get("/ready").status == 503
