"""Bodies: how many bytes of request bodies are read at the same time, over all connections."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from asyncllm.server.http.errors import HttpError

#: Smaller bodies need no room: aiohttp reads as much before anybody asks for it.
SMALL: Final = 2**16
#: How long a body waits for room until its request is refused.
WAIT_SECONDS: Final = 30.0


class Bodies:
    """Room for bodies, given in order of arrival; connections that wait are not read from.

    Attributes:
        held: bytes that have been given to bodies.
    """

    def __init__(self, most: int):
        self.held = 0
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many bodies wait for room."""
        return len(self._waiting)

    async def take(self, num_bytes: int) -> int:
        """Hold room for one body, after waiting for it; returns how much to give back.

        Raises:
            HttpError: there was none for WAIT_SECONDS.
        """
        if num_bytes <= SMALL:
            return 0
        num_bytes = min(num_bytes, self._most)  # one body alone is always read
        if not self._waiting and self.held + num_bytes <= self._most:
            self.held += num_bytes
            return num_bytes
        given = asyncio.get_running_loop().create_future()
        place = (num_bytes, given)
        self._waiting.append(place)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await given
        except BaseException as error:
            if given.done() and not given.cancelled():
                self.give_back(num_bytes)  # it came together with the cancellation
            else:
                self._waiting.remove(place)
                self._serve()  # those behind it may need less
            if isinstance(error, TimeoutError):
                raise HttpError("too many large requests are being read", 503) from None
            raise
        return num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Room that was taken is free again."""
        self.held -= num_bytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.held + self._waiting[0][0] <= self._most:
            num_bytes, given = self._waiting.popleft()
            if given.cancelled():
                continue
            self.held += num_bytes
            given.set_result(None)
