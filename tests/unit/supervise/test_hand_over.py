"""What is kept of a request, so that it can be passed on."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from asyncllm.server.arrivals.hand_over import MOST_OF_ONE, Received, Room

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"


def request(length: str = "3") -> Any:
    return make_mocked_request("POST", "/generate", headers={"Content-Length": length})


@pytest.mark.parametrize(
    ("received", "is_whole"),
    [
        (HEAD + b"abc", True),
        (HEAD + b"ab", False),  # its body is still on the way
        (HEAD + b"abcPOST", False),  # another request follows
        (b"Z" + HEAD + b"abc", False),  # the end of one that was answered
        (HEAD, False),
        (b"", False),
    ],
)
def test_only_a_whole_request_is_passed_on(received: bytes, is_whole: bool) -> None:
    kept = Received(Room())
    for part in (received[:10], received[10:]):
        kept.add(part)
    assert kept.whole(request()) == (received if is_whole else None)


def test_room_is_bounded_and_given_back() -> None:
    room = Room(most=100)
    one, other = Received(room), Received(room)
    one.add(b"x" * 80)
    other.add(b"y" * 30)  # no room: it is not kept, and neither is what follows
    other.add(b"y")
    assert room.left == 20
    assert other.whole(request()) is None
    one.clear()
    other.clear()
    assert room.left == 100
    other.add(b"y" * 30)
    assert room.left == 70
    other.drop()
    other.drop()
    assert room.left == 100


def test_a_large_request_is_not_kept() -> None:
    room = Room()
    most = room.left
    kept = Received(room)
    kept.add(b"x" * (MOST_OF_ONE + 1))
    assert room.left == most
