"""Bytes between the event loop and the executor thread of the same process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from asyncllm.wire.channel import FLUSH
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepResult, encode


class ThreadChannel:
    """A ``LeaderChannel``: ``send`` on the loop, ``receive`` and ``post`` in the thread.

    ``receive`` blocks with the GIL released. ``post`` wakes the loop once per message.

    Attributes:
        heartbeat: where the thread says what it does.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes], None],
        heartbeat: Heartbeat,
    ):
        self.heartbeat = heartbeat
        self._loop = loop
        self._on_message = on_message
        self._inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._launched = threading.Event()

    def send(self, message: bytes) -> None:
        self._inbox.put(message)

    def send_and_wait(self, plan: bytes, timeout: float) -> None:
        """Send a plan, and give the thread the GIL until it has launched one, or for ``timeout``
        seconds."""
        self._launched.clear()
        self._inbox.put(plan)
        self._launched.wait(timeout)

    def launched(self) -> None:
        self._launched.set()

    def close(self) -> None:
        """``receive`` returns None once everything sent before has been received."""
        self._inbox.put(None)

    def wake(self) -> None:
        self._inbox.put(FLUSH)

    def receive(self, timeout: float | None = None) -> bytes | None:
        return self._inbox.get(timeout=timeout)

    def post(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._on_message, encode(result))
