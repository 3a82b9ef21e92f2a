"""What the executor's worker needs of the way from and to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import StepResult, encode

#: Tells the worker to collect the steps in flight: no further plan is about to come.
FLUSH: Final = b""
#: Tells the worker to capture one more graph.
CAPTURE: Final = b"capture"  # no plan: plans are msgpack arrays


class Channel(Protocol):
    """Plans in, results out."""

    @property
    def heartbeat(self) -> Heartbeat:
        """Where the worker says what it does."""

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next message: an encoded StepPlan, FLUSH or CAPTURE; None once the channel is closed.

        Raises:
            queue.Empty: none came within ``timeout`` seconds.
        """

    def launched(self) -> None:
        """The plan that was received last is on the device's queue: Python is not busy with it."""

    def post(self, result: StepResult) -> None:
        """Hand over the result of the oldest plan that has none yet."""


class ThreadChannel:
    """The ``Channel`` of rank 0: ``send`` on the loop, ``receive`` and ``post`` in the thread.

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
        """Have ``receive`` return FLUSH, after what was sent before; from any thread."""
        self._inbox.put(FLUSH)

    def receive(self, timeout: float | None = None) -> bytes | None:
        return self._inbox.get(timeout=timeout)

    def post(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._on_message, encode(result))
