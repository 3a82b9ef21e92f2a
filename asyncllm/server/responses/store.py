"""Stored responses: in memory, with a limit of bytes for each tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from aiohttp import web
from msgspec.structs import replace

from asyncllm.server.http.answer import encode
from asyncllm.server.http.middleware import request_id
from asyncllm.server.http.slow_clients import GIVE_UP_SECONDS, MERGE_BYTES
from asyncllm.server.http.traffic import TRAFFIC
from asyncllm.server.responses.item_schemas import Item, MessageItem, OutputText
from asyncllm.server.streaming.frames import EVENT_STREAM
from asyncllm.server.streaming.sse import HEADERS

#: Limits for each tenant; the bytes do not include the bookkeeping.
MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 * 1024 * 1024


class StoredItem(NamedTuple):
    """An item as JSON, whose size is known before it is decoded."""

    id: str
    json: bytes


def stored_items(items: Iterable[Item]) -> tuple[StoredItem, ...]:
    """Items of an input or an output, without logprobs, which only the response itself keeps."""
    return tuple(StoredItem(item.id, encode(_without_logprobs(item))) for item in items)


def _without_logprobs(item: Item) -> Item:
    if not isinstance(item, MessageItem):
        return item
    parts = [
        replace(part, logprobs=[]) if isinstance(part, OutputText) and part.logprobs else part
        for part in item.content
    ]
    return replace(item, content=parts)


class EventLog:
    """The events of a background response, for streams that are opened later."""

    def __init__(self) -> None:
        self.size = 0
        self._events: list[bytes] = []
        self._more: asyncio.Event | None = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Add encoded events."""
        assert self._more is not None
        self.size += len(events)
        # JSON contains no raw newline.
        self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._more.set()
        self._more = asyncio.Event()

    def close(self) -> None:
        """No more events will come."""
        if self._more is not None:
            self._more.set()
            self._more = None

    async def send(self, request: web.Request, after: int) -> web.StreamResponse:
        """Send all events after ``sequence_number`` ``after``, and those still to come.

        Raises:
            ConnectionError: the client went away, or does not read.
        """
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": EVENT_STREAM})
        await response.prepare(request)
        sent = after + 1
        while True:
            more = self._more
            ready, sent = self._events[sent:], max(sent, len(self._events))
            if ready:
                await _write(request, response, b"".join(ready))
            elif more is None:
                return response
            else:
                await more.wait()


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write in pieces, and cut a client off that takes too long for one.

    Raises:
        ConnectionError: the client went away, or does not read.
    """
    for start in range(0, len(data), MERGE_BYTES):
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await response.write(data[start : start + MERGE_BYTES])
        except TimeoutError:
            if request.transport is not None:
                slow_clients = request.app[TRAFFIC].slow_clients
                slow_clients.cut_off(request.transport, "stalled", request_id.get("-"))
            raise ConnectionResetError("client reads too slowly") from None


class StoredResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        body: the response as JSON.
        input: its own input items, without those of earlier responses.
        output: its output items, which are also in the body.
        previous: the id of the response that it continues.
        log: its events, if it was streamed in the background.
    """

    body: bytes
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]
    previous: str | None
    background: bool
    log: EventLog | None

    def abort(self) -> None:
        """It has ended already; see ``BackgroundRun``."""

    @property
    def size(self) -> int:
        """Bytes once the log is complete: its last event contains the body."""
        logged = 0 if self.log is None else self.log.size + len(self.body)
        return len(self.body) + sum(len(item.json) for item in self.items) + logged

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return self.input + self.output


class _OfTenant:
    """The responses of one tenant."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.sizes: dict[str, int] = {}
        self.size = 0
        self.items: dict[str, tuple[str, StoredItem]] = {}  # by id, with its response

    def remove(self, id: str) -> StoredResponse | None:
        stored = self.responses.pop(id, None)
        if stored is not None:
            self.size -= self.sizes.pop(id)
            for item in stored.items:
                if self.items.get(item.id, ("",))[0] == id:
                    del self.items[item.id]
        return stored


class ResponseStore:
    """Drops the least recently used responses first, and a response before those it continues.

    For that, using a response also uses all that it continues. So if a part of a conversation is
    missing, it was deleted.
    """

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES):
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: defaultdict[str, _OfTenant] = defaultdict(_OfTenant)

    def add(self, tenant: str, id: str, stored: StoredResponse) -> None:
        """Store a response, and drop old ones if a limit is exceeded."""
        kept = self._tenants[tenant]
        kept.responses[id] = stored
        kept.sizes[id] = stored.size
        kept.size += kept.sizes[id]
        kept.items |= {item.id: (id, item) for item in stored.items}
        self._use(kept, [id])
        while len(kept.responses) > self._most or kept.size > self._most_bytes:
            kept.remove(next(iter(kept.responses)))

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        kept = self._tenants[tenant]
        if id in kept.responses:
            self._use(kept, [id])
        return kept.responses.get(id)

    def remove(self, tenant: str, id: str) -> StoredResponse | None:
        return self._tenants[tenant].remove(id)

    def history(self, tenant: str, id: str) -> list[StoredItem] | None:
        """All items of a conversation up to this response; None if a response is missing."""
        stored = self.get(tenant, id)
        if stored is None:
            return None
        before = self.before(tenant, stored)
        return None if before is None else [*before, *stored.items]

    def before(self, tenant: str, stored: StoredResponse) -> list[StoredItem] | None:
        """The items before a response's own input; None if a response is missing."""
        if stored.previous is None:
            return []
        kept = self._tenants[tenant]
        chain = [kept.responses[id] for id in _chain(kept, stored.previous)]
        if not chain or chain[-1].previous is not None:
            return None
        return [item for each in reversed(chain) for item in each.items]

    def find_items(self, tenant: str, ids: Collection[str]) -> dict[str, StoredItem]:
        """Items of any responses by id; missing ones are left out."""
        kept = self._tenants[tenant]
        found = {id: kept.items[id] for id in ids if id in kept.items}
        self._use(kept, {holder for holder, _ in found.values()})
        return {id: item for id, (_, item) in found.items()}

    @staticmethod
    def _use(kept: _OfTenant, ids: Iterable[str]) -> None:
        """Visit each response once, even if several continue it."""
        seen: set[str] = set()
        parts: list[list[str]] = []
        for id in ids:
            part = []
            for each in _chain(kept, id):
                if each in seen:
                    break
                seen.add(each)
                part.append(each)
            parts.append(part)
        # A part continues a response of an earlier part, which must be more recent.
        for part in reversed(parts):
            for each in part:
                kept.responses.move_to_end(each)


def _chain(kept: _OfTenant, id: str | None) -> Iterator[str]:
    """A response and those that it continues, up to a missing one."""
    while id is not None and (stored := kept.responses.get(id)) is not None:
        yield id
        id = stored.previous
