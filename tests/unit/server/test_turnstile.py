"""Requests that arrive together begin in order, a few per turn of the loop."""

from __future__ import annotations

import asyncio

from asyncllm.server.http.traffic import Waits
from asyncllm.server.http.turnstile import MOST_SECONDS, Turnstile


class Clock:
    """Time that passes only as requests and other work take it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Storm:
    """Requests that all arrive in one turn, and take ``seconds`` each once they begin."""

    def __init__(self, count: int, seconds: float):
        self.clock = Clock()
        self.waits = Waits()
        self.turnstile = Turnstile(self.waits, self.clock)
        self.begun: list[int] = []
        self.per_turn: list[int] = []
        self.tasks = [asyncio.create_task(self._request(i, seconds)) for i in range(count)]

    async def _request(self, number: int, seconds: float) -> None:
        await self.turnstile.enter()
        self.begun.append(number)
        self.clock.now += seconds

    async def pass_by(self, others: float = 0.0) -> None:
        """Turn the loop until all have begun; everything else takes ``others`` in each turn."""
        while not all(task.done() for task in self.tasks):
            before = len(self.begun)
            self.clock.now += others
            await asyncio.sleep(0)
            if len(self.begun) > before:
                self.per_turn.append(len(self.begun) - before)


async def test_a_lone_request_does_not_wait() -> None:
    storm = Storm(1, 0.001)
    await storm.pass_by()
    assert storm.waits.longest == 0.0


async def test_requests_begin_in_order_and_turns_stay_short() -> None:
    storm = Storm(500, 0.001)
    await storm.pass_by()
    assert storm.begun == list(range(500))
    assert max(storm.per_turn) * 0.001 <= 0.02
    assert max(storm.per_turn[20:]) <= 6, "5 ms, once it is known what a request takes"
    assert storm.waits.distribution.count == 500
    assert 0.3 < storm.waits.longest <= 0.5


async def test_requests_get_as_much_of_a_turn_as_everything_else() -> None:
    storm = Storm(2000, 0.001)
    await storm.pass_by(others=0.02)
    assert 15 <= sum(storm.per_turn[10:-1]) / len(storm.per_turn[10:-1]) <= 25


async def test_a_turn_is_bounded_all_the_same() -> None:
    storm = Storm(1000, 0.001)
    await storm.pass_by(others=1.0)
    assert max(storm.per_turn[10:]) * 0.001 <= 1.2 * MOST_SECONDS


async def test_a_client_that_left_takes_no_place() -> None:
    storm = Storm(300, 0.001)
    await asyncio.sleep(0)
    begun = len(storm.begun)
    assert begun < 100
    for task in storm.tasks[100:290]:
        task.cancel()
    await storm.pass_by()
    assert storm.begun == [*range(100), *range(290, 300)]
    assert not storm.turnstile._waiting


async def test_no_turns_without_requests() -> None:
    storm = Storm(50, 0.001)
    await storm.pass_by()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not storm.turnstile._is_turning


async def test_large_bodies_begin_one_a_turn() -> None:
    clock = Clock()
    turnstile = Turnstile(Waits(), clock)
    begun: list[int] = []

    async def request(number: int) -> None:
        await turnstile.enter(2_000_000)
        clock.now += 0.05
        begun.append(number)

    tasks = [asyncio.create_task(request(i)) for i in range(20)]
    most, before = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most, before = max(most, len(begun) - before), len(begun)
    assert begun == list(range(20))
    assert most == 1
