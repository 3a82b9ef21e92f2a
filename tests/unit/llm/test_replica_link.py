"""The link between a program and a replica: whole messages, in order, of any size."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator

import pytest

from asyncllm.llm.replicas.link import Link

#: No wait of a test that passes takes this long.
LONG = 60.0


class End:
    """One end of a link, and what has arrived there."""

    def __init__(self, end: socket.socket) -> None:
        self.arrived: list[object] = []
        self.ended = asyncio.Event()
        self.link = Link(end, self.arrived.append, self.ended.set)

    async def wait(self) -> None:
        async with asyncio.timeout(LONG):
            await self.ended.wait()


class Ends:
    """One end, and the socket of the other one."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.ours = End(ours)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    made.ours.link.close()
    made.theirs.close()


async def test_messages_of_all_sizes_cross_in_order_and_the_loop_never_waits(ends: Ends) -> None:
    sizes = [0, 1, 7, 8, 9, 5000, 300_000, 3_000_000]
    random.Random(0).shuffle(sizes)
    messages = [bytes([number]) * size for number, size in enumerate(sizes * 2)]
    for message in messages:  # before anybody reads them
        ends.ours.link.send(message)
    ends.ours.link.finish()
    other = End(ends.theirs)
    await other.wait()
    assert other.arrived == messages


@pytest.mark.parametrize("unread", [False, True])
async def test_the_end_is_told_after_the_last_message(ends: Ends, unread: bool) -> None:
    if unread:
        ends.ours.link.send("never read")
    other = End(ends.theirs)
    other.link.send(1)
    other.link.send(2)
    other.link.close()
    await ends.ours.wait()
    if not unread:  # a process that is killed may take its last words with it
        assert ends.ours.arrived == [1, 2]
    ends.ours.link.send("nobody is there")
    ends.ours.link.finish()


async def test_a_message_that_is_cut_off_is_none(ends: Ends) -> None:
    ends.theirs.send(b"\x05\0\0\0\0\0\0\0abc")
    ends.theirs.close()
    await ends.ours.wait()
    assert ends.ours.arrived == []


async def test_the_end_is_seen_although_a_forked_process_has_the_socket(ends: Ends) -> None:
    other = End(ends.theirs)
    with ends.ours.link._end.dup():
        ends.ours.link.close()
        await other.wait()
