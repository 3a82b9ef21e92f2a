"""PrefixRouter, as Ray Serve calls it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import RequestRouter

from asyncllm.ray.application import MOST_REPLICAS, PrefixRouter
from asyncllm.ray.replica import Request

NAMES = ("a", "b", "c")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PrefixRouter:
    # What Ray Serve's class does with replicas needs a running Ray.
    monkeypatch.setattr(RequestRouter, "__init__", lambda self: None)
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda self, replicas: None)
    made = PrefixRouter()
    made.initialize_state()
    return made


def replicas(*names: str) -> list[Any]:
    return [
        SimpleNamespace(replica_id=name, replica_metadata={"number": NAMES.index(name)})
        for name in names
    ]


def pending(name: str, prompt: str) -> Any:
    body = json.dumps({"prompt": prompt}).encode()
    return SimpleNamespace(
        args=[Request(b"POST", b"/v1/completions", "/v1/completions", [], body, None)],
        metadata=SimpleNamespace(internal_request_id=name),
        future=asyncio.get_running_loop().create_future(),
    )


async def choose(router: PrefixRouter, request: Any, names: tuple[str, ...] = NAMES) -> Any:
    [[replica]] = await router.choose_replicas(replicas(*names), request)
    return replica.replica_id


async def send(router: PrefixRouter, name: str, prompt: str) -> str:
    """Route a request; returns the replica that has taken it."""
    request = pending(name, prompt)
    chosen: Any = await choose(router, request)
    router.on_request_routed(request, chosen, None)
    return str(chosen)


async def test_a_prompt_goes_where_its_prefix_is(router: PrefixRouter) -> None:
    prompts = [f"{i}" * 1000 for i in range(3)]
    homes = [await send(router, f"first {i}", prompt) for i, prompt in enumerate(prompts)]
    assert sorted(homes) == list(NAMES)
    again = [await send(router, f"next {i}", p + "more") for i, p in enumerate(prompts)]
    assert again == homes


async def test_a_response_is_asked_for_where_it_is(router: PrefixRouter) -> None:
    request = pending("one", "")
    for number, name in enumerate(NAMES):
        path = f"/v1/responses/resp_{'0' * 30}{number:02x}"
        request.args = [Request(b"GET", path.encode(), path, [], b"", None)]
        assert await choose(router, request) == name
        router._choices.clear()
    request.args = [Request(b"GET", b"/x", "/x", [], b"", None, home=1)]
    assert await choose(router, request) == NAMES[1]
    router._choices.clear()
    path = f"/v1/responses/resp_{'0' * 30}ff"  # nobody has it: anyone says so
    request.args = [Request(b"GET", path.encode(), path, [], b"", None)]
    assert await choose(router, request) in NAMES


async def test_work_ends_with_requests(router: PrefixRouter) -> None:
    homes = [await send(router, f"{i}", f"{i}" * 300) for i in range(30)]
    assert {homes.count(name) for name in NAMES} == {10}
    for i, home in enumerate(homes):
        router.on_request_completed(home, f"{i}")
    assert set(router._router.work) == {0.0}
    assert not router._placed


async def test_a_replica_that_does_not_take_a_request_is_not_asked_again(
    router: PrefixRouter,
) -> None:
    request = pending("one", "x" * 1000)
    first = await choose(router, request)
    assert await choose(router, request) != first
    assert len(router._placed) == 1
    alone = pending("two", "y" * 1000)
    assert await choose(router, alone, ("a",)) == "a"
    assert await choose(router, alone, ("a",)) == "a"


async def test_a_request_that_its_client_gave_up_is_no_work(router: PrefixRouter) -> None:
    request = pending("one", "x" * 1000)
    await choose(router, request)
    request.future.cancel()
    home = await send(router, "two", "y")
    router.on_request_completed(home, "two")
    assert set(router._router.work) == {0.0}


async def test_a_new_replica_gets_the_number_of_one_that_is_gone(router: PrefixRouter) -> None:
    home = await send(router, "one", "x" * 1000)
    others = [name for name in NAMES if name != home]
    router.update_replicas(replicas(*others))
    assert set(router._router.work) == {0.0}
    assert len(router._unused) == MOST_REPLICAS - 2
    router.on_request_completed(home, "one")  # comes late
    assert await choose(router, pending("two", "x" * 1000), tuple(others)) in others
