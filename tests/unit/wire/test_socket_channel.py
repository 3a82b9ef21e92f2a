"""The socket between the loop and an executor's process: whole messages, in order, of any size."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from queue import Empty

import pytest

from asyncllm.wire.channel import FLUSH
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepResult, decode_result
from asyncllm.wire.socket_channel import SocketChannel, SocketLink

#: No wait of a test that passes takes this long.
LONG = 60.0


class Ends:
    """Both ends of a socket, and what has arrived on the loop."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.arrived: list[bytes] = []
        self.ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.link = SocketLink(loop, ours, self.arrived.append, self.ended.set)
        self.channel = SocketChannel(self.theirs, Heartbeat())


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    made.link.close()
    made.theirs.close()


def result_of(step: int, size: int) -> StepResult:
    return StepResult(step, bytes(size), (), None, 0.0, 0.0)


def serve(channel: SocketChannel, answer: Callable[[bytes], None]) -> threading.Thread:
    """A process's main thread: it answers each message."""

    def work() -> None:
        while (message := channel.receive(LONG)) is not None:
            answer(message)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


async def test_messages_of_all_sizes_cross_in_order_and_the_loop_never_waits(ends: Ends) -> None:
    sizes = [0, 1, 7, 8, 9, 5000, 300_000, 3_000_000]
    random.Random(0).shuffle(sizes)
    sizes = sizes * 2
    received: list[bytes] = []

    def answer(message: bytes) -> None:
        received.append(message)
        ends.channel.post(result_of(len(received), len(message)))

    for number, size in enumerate(sizes):  # before anybody reads them
        ends.link.send(bytes([number]) * size)
    ends.link.finish()
    thread = serve(ends.channel, answer)
    async with asyncio.timeout(LONG):
        while len(ends.arrived) < len(sizes):  # noqa: ASYNC110 (nobody tells when)
            await asyncio.sleep(0.001)
    thread.join(LONG)
    assert not thread.is_alive()
    assert received == [bytes([number]) * size for number, size in enumerate(sizes)]
    results = [decode_result(message) for message in ends.arrived]
    assert [(result.step, len(result.tokens)) for result in results] == [
        (number + 1, size) for number, size in enumerate(sizes)
    ]


async def test_a_thread_that_waits_can_be_woken(ends: Ends) -> None:
    with pytest.raises(Empty):
        ends.channel.receive(0.01)
    woken: list[bytes] = []
    thread = serve(ends.channel, woken.append)
    ends.channel.wake()
    async with asyncio.timeout(LONG):
        while not woken:  # noqa: ASYNC110 (nobody tells when)
            await asyncio.sleep(0.001)
    assert woken == [FLUSH]
    ends.link.finish()
    await asyncio.to_thread(thread.join, LONG)
    assert not thread.is_alive()


@pytest.mark.parametrize("unread", [False, True])
async def test_the_loop_is_told_of_the_end_after_the_last_message(ends: Ends, unread: bool) -> None:
    if unread:
        ends.link.send(b"never read")
    ends.channel.post(result_of(1, 10))
    ends.channel.post(result_of(2, 10))
    ends.theirs.close()
    async with asyncio.timeout(LONG):
        await ends.ended.wait()
    if not unread:  # a process that is killed may take its last words with it
        assert [decode_result(message).step for message in ends.arrived] == [1, 2]
    ends.link.send(b"nobody is there")
    ends.link.finish()


async def test_a_process_that_ends_within_a_message_sends_none(ends: Ends) -> None:
    ends.theirs.send(b"\x05\0\0\0\0\0\0\0abc")
    ends.theirs.close()
    async with asyncio.timeout(LONG):
        await ends.ended.wait()
    assert ends.arrived == []


async def test_a_message_that_is_cut_off_is_the_end_for_the_process(ends: Ends) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = SocketChannel(theirs, Heartbeat())
        with ours:
            ours.send(b"\x05\0\0\0\0\0\0\0abc")
        assert channel.receive(LONG) is None
        assert channel.receive(LONG) is None


async def test_the_end_is_seen_although_a_forked_process_has_the_socket(ends: Ends) -> None:
    with ends.link._end.dup():
        ends.link.close()
        assert await asyncio.to_thread(ends.channel.receive, LONG) is None
