"""Sinks for code that awaits: one delta at a time, or the whole output at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asyncllm.types import TokenDelta


class Mailbox:
    """A sink of one slot: deltas merge while the reader is busy, so nothing piles up."""

    def __init__(self) -> None:
        self._delta: TokenDelta | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def emit(self, delta: TokenDelta) -> None:
        if self._delta is None:
            self._delta = delta
        else:
            self._delta.merge(delta)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def get(self) -> TokenDelta:
        """The next delta, or everything that came since the last one.

        Raises:
            AsyncLLMError: the request failed; what came before has been returned already.
        """
        await self._arrived.wait()
        self._arrived.clear()
        if self._delta is not None:
            delta, self._delta = self._delta, None
            if self._error is not None:
                self._arrived.set()
            return delta
        assert self._error is not None, "set together with the event"
        raise self._error


class Collector:
    """A sink that wakes its reader once, at the end."""

    def __init__(self) -> None:
        self._whole = TokenDelta()
        self._finished: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()

    def emit(self, delta: TokenDelta) -> None:
        self._whole.merge(delta)
        if delta.finish_reason is not None and not self._finished.done():
            self._finished.set_result(self._whole)

    def fail(self, error: Exception) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    async def whole(self) -> TokenDelta:
        """Everything, merged into one delta. Raises what the request failed with."""
        return await self._finished

    @staticmethod
    async def all(collectors: Iterable[Collector]) -> list[TokenDelta]:
        """The ``whole`` of each; raises as soon as one of them does."""
        return await asyncio.gather(*(collector._finished for collector in collectors))
