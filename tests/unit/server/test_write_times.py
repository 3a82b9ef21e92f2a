"""Times of writes: streams of one turn are looked at together, after it."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from asyncllm.server.streaming.write_times import WriteTimes
from asyncllm.system.event_loop import new_event_loop


def test_first_writes_and_those_after() -> None:
    now = [0.0]
    times = WriteTimes(lambda: now[0])
    first: Any = SimpleNamespace(arrived=1.0, written_at=0.0)
    second: Any = SimpleNamespace(arrived=2.5, written_at=0.0)

    times.written += [first, second]
    now[0] = 3.0
    times.observe()
    assert (times.first.total, sum(times.first.counts)) == (2.0 + 0.5, 2)
    assert sum(times.between.counts) == 0
    assert times.written == []

    times.written += [first, second]
    now[0] = 3.25
    times.observe()
    assert (times.between.total, sum(times.between.counts)) == (0.5, 2)

    times.written += [second]
    now[0] = 4.25
    times.observe()
    assert (times.between.total, sum(times.between.counts)) == (1.5, 3)
    assert (first.written_at, second.written_at) == (3.25, 4.25)


def test_a_turns_writes_have_reached_the_socket_in_the_next_turn() -> None:
    """What ``observe`` rests on."""

    async def main() -> list[bytes]:
        loop, seen = asyncio.get_running_loop(), list[bytes]()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)

        def look() -> None:
            try:
                seen.append(theirs.recv(10))
            except BlockingIOError:
                seen.append(b"")

        transport.write(b"token")
        look()
        loop.call_soon(look)
        await asyncio.sleep(0.01)
        transport.close()
        theirs.close()
        return seen

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        assert b"".join(runner.run(main())) == b"token"
