"""What becomes of connections when there are too many."""

from __future__ import annotations

import logging
import os
import resource

import pytest

from asyncllm.supervise.crowd import (
    IDLE_SECONDS,
    LEAST_IDLE_SECONDS,
    LOG_SECONDS,
    SPARE,
    Crowd,
    FileLimit,
    Use,
    allow_all_files,
)
from tests.support.server.files import limited


class Idle:
    """A connection."""

    def __init__(self, name: int, *, is_idle: bool = True):
        self.name = name
        self.is_idle = is_idle
        self.is_closed = False

    def leave(self) -> bool:
        assert not self.is_closed
        self.is_closed = self.is_idle
        return self.is_idle


class Room:
    """A crowd of a process that may have 64 files, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        with limited(64):
            self.crowd = Crowd(lambda: self.now)
        self.connections: list[Idle] = []

    def rest(self, count: int, *, is_idle: bool = True) -> None:
        for _ in range(count):
            self.connections.append(Idle(len(self.connections), is_idle=is_idle))
            self.crowd.rests(self.connections[-1])

    def closed(self) -> list[int]:
        return [connection.name for connection in self.connections if connection.is_closed]


@pytest.mark.parametrize(("files", "spare"), [(8, 2), (64, 16), (256, SPARE), (2**20, SPARE)])
def test_connections_leave_some_files_free(files: int, spare: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files > hard:
        pytest.skip("not allowed here")
    with limited(files):
        limit = FileLimit.now()
    assert limit == (files, files - spare, files - spare // 2)


def test_the_limit_is_raised_as_far_as_it_may_be(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(64), caplog.at_level(logging.INFO):
        allow_all_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert FileLimit.now().files == hard
    assert f"at most {hard} open files" in caplog.text


def test_with_files_to_spare_nobody_is_closed() -> None:
    room = Room()
    room.rest(30)
    room.now += 1000
    assert room.crowd.use_of(43) is Use.FREELY
    assert not room.closed()


def test_the_longest_idle_go_first_and_make_room_for_more_than_one() -> None:
    room = Room()
    room.rest(4)
    room.crowd.works(room.connections[1])
    room.now += 1
    room.crowd.rests(room.connections[0])
    room.rest(30)
    room.now += IDLE_SECONDS
    assert room.crowd.use_of(44) is Use.FREELY
    assert room.closed() == [0, 2, 3, 4]
    assert room.crowd.use_of(50) is Use.ONCE
    assert room.closed() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert room.crowd.counts == {"closed": 8, "refused": 0}


def test_only_probes_are_served_when_nobody_is_idle_for_long() -> None:
    room = Room()
    room.rest(30)
    room.rest(1, is_idle=False)
    room.now += IDLE_SECONDS / 2
    assert room.crowd.use_of(47) is Use.FREELY
    assert room.crowd.use_of(48) is Use.PROBING
    assert not room.closed()


def test_a_request_that_is_just_coming_is_not_cut_off() -> None:
    room = Room()
    room.rest(3, is_idle=False)
    room.rest(1)
    room.now += IDLE_SECONDS
    assert room.crowd.use_of(48) is Use.ONCE
    assert room.closed() == [3]


def test_full_is_without_files_for_probes() -> None:
    room = Room()
    room.rest(30)
    room.now += LEAST_IDLE_SECONDS
    with open(os.devnull, "rb") as file:
        lowest = os.dup(file.fileno())  # of the numbers that are free, between those of others
        os.close(lowest)
        room.crowd.limit = FileLimit(lowest + 9, lowest - 7, lowest + 1)
        assert not room.crowd.is_full(file.fileno())
        room.crowd.limit = FileLimit(lowest + 8, lowest - 8, lowest)
        assert room.crowd.is_full(file.fileno())
        assert room.closed() == list(range(16))
        with limited(lowest):
            assert room.crowd.is_full(file.fileno())
        assert room.closed() == list(range(30))


def test_the_log_says_it_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    room = Room()
    error = room.crowd.refusal()
    assert (error.status, error.code) == (503, "too_many_connections")
    assert "ulimit -n: 64" in error.message
    room.crowd.num_open = 40
    for _ in range(3):
        room.crowd.refusal()
        room.now += LOG_SECONDS / 3
    assert len(caplog.records) == 1
    room.crowd.refusal()
    assert caplog.records[1].getMessage().startswith("40 connections are open, with a limit of 64")
