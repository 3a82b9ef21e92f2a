"""When a server that died is started again."""

from __future__ import annotations

import pytest

from asyncllm.supervise.server import FAILED_STARTS, LONGEST_DELAY, STEADY_SECONDS, Restarts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def restarts(clock: Clock) -> Restarts:
    return Restarts(clock)


def test_a_server_that_never_served_is_not_started_again(restarts: Restarts) -> None:
    assert restarts.delay() is None
    assert restarts.count == 0


def test_a_server_that_never_served_is_started_again_while_others_serve(restarts: Restarts) -> None:
    delays = [restarts.delay(again=True) for _ in range(FAILED_STARTS)]
    assert delays == [0, 1, 2, 4, None]


def test_the_delay_doubles_up_to_a_bound(restarts: Restarts) -> None:
    delays = []
    for _ in range(2000):  # 17 hours of a server that dies soon after it is ready
        restarts.ready()
        delays.append(restarts.delay())
    assert delays[:6] == [0, 1, 2, 4, 8, 16]
    assert set(delays[6:]) == {LONGEST_DELAY}
    assert restarts.count == 2000


def test_a_server_that_served_for_a_while_starts_at_once(restarts: Restarts, clock: Clock) -> None:
    for _ in range(4):
        restarts.ready()
        restarts.delay()
    restarts.ready()
    clock.now += STEADY_SECONDS
    assert restarts.delay() == 0
    # Only the time in which it served counts.
    clock.now += STEADY_SECONDS
    assert restarts.delay() == 1


def test_starts_that_fail_are_given_up(restarts: Restarts) -> None:
    restarts.ready()
    restarts.delay()
    delays = [restarts.delay() for _ in range(FAILED_STARTS)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_a_start_that_works_ends_the_count_of_those_that_fail(restarts: Restarts) -> None:
    restarts.ready()
    for _ in range(3):
        for _ in range(FAILED_STARTS - 1):
            assert restarts.delay() is not None
        restarts.ready()
    assert restarts.delay() is not None
