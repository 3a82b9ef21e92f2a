"""The front of several replicas answers any bytes as a plain server does."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm.config.server_config import ServerConfig
from tests.http.process.test_supervise import PATIENCE, supervised
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.raw_cases import CASES, FOLLOWING
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervision needs Linux")

#: Between pieces; and without a byte until what follows a case is sent.
PIECE_SECONDS, QUIET_SECONDS = 0.03, 0.3
#: Cases at one time: with more, pieces that come one by one are read together.
AT_ONCE = 64
#: Tries of a case of several pieces: on a busy machine some are read together, here or there.
TRIES = 5
#: What of an answer must be the same: not ids, dates and lengths.
KEPT = re.compile(
    rb"^(HTTP/[\d.]+ \d+ [^\r]*|(?:Connection|Allow|Content-Type): [^\r]*)\r$"
    rb'|"message":"((?:[^"\\]|\\.)*)"',
    re.MULTILINE | re.IGNORECASE,
)

Fate = tuple[list[str], bool, list[str]]


class Client(asyncio.Protocol):
    """Reads all the time, so that a reset at the end takes nothing from what came before."""

    def __init__(self) -> None:
        self.received = b""
        self.has_ended = False
        self._news = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def eof_received(self) -> None:
        self.has_ended = True
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        self._news.set()

    async def news(self, seconds: float) -> bool:
        """Whether something came within this time."""
        self._news.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
            return True
        return False


async def fate(port: int, pieces: Sequence[bytes], expected: Fate | None = None) -> Fate:
    """What is answered, whether the connection is open then, and what is answered after that.

    Args:
        expected: is waited for, longer than it could take.
    """
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", port)
    try:
        for piece in pieces:
            if piece:
                transport.write(piece)
            elif not transport.is_closing():
                transport.write_eof()
            if len(pieces) > 1:
                await asyncio.sleep(PIECE_SECONDS)
        if expected is not None:
            answers, is_open, _ = expected
            async with asyncio.timeout(PATIENCE):
                while not client.has_ended and (
                    not is_open or len(told(client.received)) < len(answers)
                ):
                    await client.news(1.0)
        while not client.has_ended and await client.news(QUIET_SECONDS):
            pass
        first, is_open = client.received, not client.has_ended
        if is_open and pieces[-1]:
            transport.write(FOLLOWING)
            async with asyncio.timeout(PATIENCE):
                while not client.has_ended:
                    await client.news(1.0)
    finally:
        transport.abort()
        await asyncio.sleep(0)
    answers = told(first)
    if not pieces[-1]:  # an answer says "close" if the client's end came before it, and may be late
        late = ("Connection", "HTTP/1.1 100 ")
        answers = [line for line in answers if not line.startswith(late)]
    return answers, is_open, told(client.received[len(first) :])


def told(answers: bytes) -> list[str]:
    return [match[0].decode("latin-1") for match in KEPT.finditer(answers)]


@pytest.fixture(scope="module")
def fates() -> Iterator[dict[str, tuple[Fate, Fate]]]:
    """By case: of a plain server, and of a front with two replicas."""
    config = ServerConfig(request_seconds=4.0)
    options: dict[str, Any] = {"server": {"request_seconds": 4.0}, "max_waiting": 200}

    async def all_of(plain: int, front: int) -> list[tuple[Fate, Fate]]:
        few = asyncio.Semaphore(AT_ONCE)

        async def both(case: Sequence[bytes]) -> tuple[Fate, Fate]:
            expected = await fate(plain, case)
            return expected, await fate(front, case, expected)

        async def at_best(case: Sequence[bytes]) -> tuple[Fate, Fate]:
            async with few:
                pair = await both(case)
            for _ in range(TRIES if len(case) > 1 else 0):
                if pair[0] != pair[1]:
                    pair = await both(case)
            return pair

        return await asyncio.gather(*map(at_best, CASES.values()))

    make = partial(FakeLLM, max_waiting=200)
    with (
        serving(make, config, is_guarded=True) as plain,
        supervised(replicas=2, **options) as running,
    ):
        running.until_ready()
        found = asyncio.run(all_of(plain.port, running.port))
        yield dict(zip(CASES, found, strict=True))
        assert running.status("/health") == 200
        running.process.terminate()
        assert running.end() == 0
    assert "Traceback" not in "".join(running.log)


@pytest.mark.parametrize("case", CASES)
def test_each_answer_and_the_end_are_the_same(
    fates: dict[str, tuple[Fate, Fate]], case: str
) -> None:
    plain, front = fates[case]
    assert front == plain
