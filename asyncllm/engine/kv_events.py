"""KV events: what the prefix cache holds, published for routers that choose a server by prefix.

The form is vLLM's: msgpack arrays over ZMQ. A message has three frames: the topic, a sequence
number (8 bytes, big-endian) and a batch. Missed batches can be asked for at another socket.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgspec
import zmq

from asyncllm.engine.cache.changes import Changes, announce, withdraw
from asyncllm.errors import ModelError

log = logging.getLogger(__name__)

#: Batches kept for those who missed some: at most as many, and of as many bytes.
REPLAY_BATCHES: Final = 10_000
REPLAY_BYTES: Final = 64 << 20
#: Batches that wait for the thread, or for a subscriber that does not read. Later ones are lost,
#: which their sequence numbers show.
MOST_WAITING: Final = 10_000
CLOSE_SECONDS: Final = 1.0
#: After the last batch of a replay.
END: Final = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Pages of one path came, one below the other; ``token_ids`` are those of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Pages went."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """All pages went."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened at a time; ``ts`` is that of ``time.time``."""

    ts: float
    events: list[Event]


class KVEventPublisher:
    """Publishes changes in a thread of its own, which hashes, encodes and sends.

    ``publish`` belongs to the event loop. It never waits, whoever reads.

    Args:
        endpoint: as ``EngineConfig.kv_events``; replays are at the next port.
        block_size: tokens of a page.

    Raises:
        ModelError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, topic: str, block_size: int):
        self._topic = topic.encode()
        self._block_size = block_size
        #: Of each: when, how many were lost before it, and what has changed.
        self._waiting: deque[tuple[float, int, Changes]] = deque()
        self._lost = 0
        self._num_sent = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context(io_threads=1)
        self._context.linger = 0
        # Wakes the thread up; it holds no data.
        self._wake: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._woken: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._replays: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._woken.bind("inproc://wake")
            self._wake.connect("inproc://wake")
            self._events.sndhwm = MOST_WAITING
            self._replays.sndhwm = 2 * REPLAY_BATCHES
            self._bind(self._events, endpoint)
            address, _, port = endpoint.rpartition(":")
            self._bind(self._replays, f"{address}:{int(port) + 1}")
        except BaseException:
            self._context.destroy()
            raise
        self._thread = threading.Thread(target=self._run, name="asyncllm-kv-events", daemon=True)
        self._thread.start()
        # Whatever a server that was here before has said is no longer so.
        self.publish(Changes(True, [], []))

    def publish(self, changes: Changes) -> None:
        """Have a batch sent soon. If too many wait, it is lost, and with it its number."""
        if not any(changes) or self._context.closed:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._lost += 1
            if self._lost == 1:
                log.warning("KV events are lost: the thread that sends them is behind")
            return
        self._waiting.append((time.time(), self._lost, changes))
        with suppress(zmq.Again):  # else it has been woken often enough
            self._wake.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what waits, and end the thread. May be called again."""
        if self._context.closed:
            return
        self._wake.send(b"end")
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the thread of KV events does not end")
            return
        self._context.destroy(linger=100)

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ModelError(
                f"kv_events: cannot bind {endpoint}: {error}", param="kv_events"
            ) from None

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        ending = False
        while not ending:
            ready = dict(poller.poll())
            if self._woken in ready:
                ending = self._woken.recv() == b"end"
            try:
                while self._waiting:
                    self._send(*self._waiting.popleft())
                if self._replays in ready:
                    self._replay(self._replays.recv_multipart())
            except Exception:
                log.exception("a KV event was not sent")

    def _send(self, at: float, num_lost: int, changes: Changes) -> None:
        events = self._events_of(changes)
        if not events:
            return
        number = self._num_sent + num_lost
        self._num_sent += 1
        data = msgspec.msgpack.encode(EventBatch(at, events))
        self._kept.append((number, data))
        self._kept_bytes += len(data)
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), data))

    def _events_of(self, changes: Changes) -> list[Event]:
        events: list[Event] = []
        if changes.cleared:
            events.append(AllBlocksCleared())
        if digests := withdraw(changes.removed):
            events.append(BlockRemoved(digests))
        for path in announce(changes.stored):
            ids = array("i", path.tokens).tolist()
            events.append(BlockStored(path.digests, path.parent, ids, self._block_size))
        return events

    def _replay(self, request: list[Any]) -> None:
        """Send the batches that are kept, from a number on, and ``END``."""
        client, *_, start = request
        first = int.from_bytes(start, "big")
        for number, data in self._kept:
            if number >= first:
                frames = (client, b"", number.to_bytes(8, "big"), data)
                self._replays.send_multipart(frames, zmq.NOBLOCK)
        self._replays.send_multipart((client, b"", END, b""), zmq.NOBLOCK)
