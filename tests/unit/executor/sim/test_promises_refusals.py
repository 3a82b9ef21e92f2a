"""What users are promised about refusals, on a simulated H200 with an 8B model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.engine.policy import Fair
from asyncllm.errors import DeadlineExceeded, QueueFull
from tests.support.engine.sim_clients import Clients, Sent, simulate

pytestmark = pytest.mark.slow

# -- deadlines -------------------------------------------------------------------------------------


async def learn(clients: Clients) -> None:
    """Let the engine see enough to know the machine's speed."""
    for _ in range(50):
        clients.send(clients.rng.choice([100, 400, 1500]), clients.rng.choice([16, 64, 200]))
    await clients.over()


async def seconds_for(clients: Clients, prompt: int, output: int, **scheduling: Any) -> float:
    request = clients.send(prompt, output, **scheduling)
    await request.over()
    assert request.error is None
    return request.ended - request.arrival


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async def scenario(clients: Clients) -> None:
        await learn(clients)
        needed = await seconds_for(clients, 1000, 100)
        waiting = clients.llm.stats.waiting
        with pytest.raises(DeadlineExceeded, match="cannot be met"):
            clients.send(1000, 100, deadline_ms=500 * needed)
        assert clients.llm.stats.waiting == waiting
        assert await seconds_for(clients, 1000, 100, deadline_ms=1500 * needed) < 1.5 * needed
        # The queue before it counts, too.
        for _ in range(500):
            clients.send(1000, 30)
        with pytest.raises(DeadlineExceeded, match="cannot be met"):
            clients.send(1000, 100, deadline_ms=3000)
        last = clients.send(1000, 100, deadline_ms=60_000)
        await clients.over()
        assert last.error is None
        assert last.ended - last.arrival > 3

    simulate(scenario)


@pytest.mark.parametrize("before", ["long prompts", "many requests", "another's flood"])
def test_a_deadline_that_can_be_met_is_not_refused(before: str) -> None:
    async def scenario(clients: Clients) -> None:
        await learn(clients)
        urgent: dict[str, Any] = {"tenant": "light"}
        timeout = 2000.0
        if before == "long prompts":
            for _ in range(40):
                await clients.over([clients.send(8000, 1)])
        elif before == "many requests":
            for _ in range(1000):
                clients.send(1000, 30)
            urgent, timeout = {}, 60_000
        else:
            for _ in range(1000):
                clients.send(1000, 30, tenant="heavy")
        assert await seconds_for(clients, 100, 50, **urgent, deadline_ms=timeout) < timeout / 1000
        clients.abort_all()

    simulate(scenario, Fair())


def test_a_deadline_that_passes_ends_its_request_and_no_other() -> None:
    async def scenario(clients: Clients, *, expire: bool = True) -> list[Sent]:
        """One that runs and one that waits meet their end, by their deadlines or otherwise."""
        await learn(clients)
        # How long its answer will be cannot be known, so that it may be in time.
        doomed: dict[str, Any] = {"stop_token_ids": (3,)}
        if expire:
            doomed["deadline_ms"] = 1500
        running = clients.send(8000, 20_000, **doomed)
        await asyncio.sleep(0.5)
        others = [clients.send(300, 400) for _ in range(3)]
        waiting = clients.send(8000, 20_000, **doomed)
        await asyncio.sleep(0.9)
        assert clients.llm.stats.pages_held > 500
        last = clients.send(300, 400, deadline_ms=60_000)
        for request in (running, waiting):
            await clients.sleep_until(request.arrival + 1.5 - clients.began)
            if not expire:
                clients.llm.abort(request.id)
        assert len(running.times) > 100
        assert not waiting.times
        if expire:
            for request in (running, waiting):
                await request.over()
                assert isinstance(request.error, DeadlineExceeded)
                # As soon as the event loop has time.
                assert request.ended == pytest.approx(request.arrival + 1.5, abs=0.002)
        await asyncio.sleep(0.1)
        assert clients.llm.stats.pages_held < 4 * 700 / 16, "its 500 pages are back"
        await clients.over([*others, last])
        return [*others, last]

    async def without_deadlines(clients: Clients) -> list[Sent]:
        return await scenario(clients, expire=False)

    dropped, aborted = (
        simulate(variant, max_num_seqs=4) for variant in (scenario, without_deadlines)
    )
    for one, other in zip(dropped, aborted, strict=True):
        assert len(one.times) == 400
        assert one.times == pytest.approx(other.times)


# -- a full queue ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "output", "options"),
    [
        ((500, 1000, 1500), 30, {"max_waiting": 1000}),
        ((500, 1000, 1500), 30, {"max_waiting_tokens": 1_000_000}),
        ((50,), 300, {"max_waiting": 1000, "max_num_seqs": 64}),
        ((500,), 300, {"max_waiting": 300, "kv_cache_tokens": 20_000, "max_model_len": 2048}),
    ],
    ids=["requests", "tokens", "slots", "pages"],
)
def test_a_full_queue_says_when_a_tenth_of_it_will_be_served(
    prompts: tuple[int, ...], output: int, options: dict[str, Any]
) -> None:
    async def scenario(clients: Clients) -> tuple[float, list[Sent], float]:
        rng = clients.rng
        for _ in range(150):
            clients.send(rng.choice(prompts), output)
        await clients.over()
        del clients.sent[:]
        retry_after = None
        while retry_after is None:
            try:
                clients.send(rng.choice(prompts), output)
            except QueueFull as refusal:
                retry_after = refusal.retry_after
            else:
                await asyncio.sleep(1e-4)
        now = clients.now
        await clients.over()
        return retry_after, clients.sent, now

    retry_after, sent, now = simulate(scenario, **options)
    now += sent[0].arrival
    waiting = sorted((s for s in sent if s.started > now), key=lambda request: request.started)
    left = 0.1 * sum(request.num_prompt for request in waiting)
    for request in waiting:
        left -= request.num_prompt
        if left <= 0:
            took = request.started - now
            break
    assert took > 1.0
    assert took / 3 < retry_after < 3 * took
