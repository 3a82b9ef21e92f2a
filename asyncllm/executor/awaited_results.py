"""Who waits for the results of an executor's steps, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncllm.errors import EngineDead
from asyncllm.wire.executor import ResultHandler


class AwaitedResults:
    """The handlers of the steps in flight; belongs to the event loop."""

    def __init__(self) -> None:
        self._handlers: deque[ResultHandler] = deque()
        self._dead: EngineDead | None = None
        self._tell: Callable[[str], None] = lambda cause: None

    def on_death(self, tell: Callable[[str], None]) -> None:
        """See ``Executor.on_death``."""
        self._tell = tell

    def expect(self, on_result: ResultHandler) -> bool:
        """A step is to be submitted; False if there is no executor any more to submit it to."""
        if self._dead is not None:
            asyncio.get_running_loop().call_soon(on_result, self._dead)
            return False
        self._handlers.append(on_result)
        return True

    def arrived(self, message: bytes) -> None:
        """The result of the oldest step is there."""
        if self._handlers:  # else it has been closed meanwhile
            self._handlers.popleft()(message)

    def close(self) -> None:
        """The executor was closed: steps get no result any more."""
        self._end(EngineDead("engine closed"))

    def die(self, cause: EngineDead) -> None:
        """The executor has died, and this is told."""
        if self._dead is None:
            self._end(cause)
            self._tell(cause.message)

    def _end(self, cause: EngineDead) -> None:
        self._dead = self._dead or cause
        while self._handlers:
            self._handlers.popleft()(self._dead)
