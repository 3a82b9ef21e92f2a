"""Responses that are kept for later: in memory, a bounded number of bytes for each tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from aiohttp import web

from asyncllm.server.reply import EVENT_STREAM
from asyncllm.server.sse import GIVE_UP_SECONDS, HEADERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.server.responses_input import Item

#: Of each tenant: so many responses, and so many bytes of them, without their bookkeeping.
MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 * 1024 * 1024

_decode = msgspec.json.Decoder().decode


class EventLog:
    """The events of a response that is made in the background, for streams that come later."""

    def __init__(self) -> None:
        self.size = 0
        self._events: list[bytes] = []
        self._more: asyncio.Event | None = asyncio.Event()

    def add(self, events: bytes) -> None:
        """Several, as they would be sent."""
        assert self._more is not None
        self.size += len(events)
        # Within JSON there is no newline.
        self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._more.set()
        self._more = asyncio.Event()

    def close(self) -> None:
        """There will be no more."""
        if self._more is not None:
            self._more.set()
            self._more = None

    async def send(self, request: web.Request, after: int) -> web.StreamResponse:
        """All events behind the one with the ``sequence_number`` ``after``, up to the last.

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
                try:
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        await response.write(b"".join(ready))
                except TimeoutError:
                    raise ConnectionResetError("client reads too slowly") from None
            elif more is None:
                return response
            else:
                await more.wait()


class StoredResponse(NamedTuple):
    """A response that has ended.

    Attributes:
        body: the response as JSON.
        items: its own input items as JSON: those of earlier responses not among them.
        previous: the id of the response that it continues.
        log: of its events, if it was streamed in the background.
    """

    body: bytes
    items: bytes
    previous: str | None
    background: bool
    log: EventLog | None

    @property
    def size(self) -> int:
        """Bytes, when it is stored: the log's last event, which holds the body, is yet to come."""
        logged = 0 if self.log is None else self.log.size + len(self.body)
        return len(self.body) + len(self.items) + logged

    @property
    def input(self) -> list[Item]:
        items: list[Item] = _decode(self.items)
        return items

    @property
    def output(self) -> list[Item]:
        items: list[Item] = _decode(self.body)["output"]
        return items


class _Shelf:
    """One tenant's."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.sizes: dict[str, int] = {}
        self.size = 0
        self.holders: dict[str, str] = {}  # of items, by id

    def remove(self, id: str) -> StoredResponse | None:
        stored = self.responses.pop(id, None)
        if stored is not None:
            self.size -= self.sizes.pop(id)
            for item in stored.input + stored.output:
                if self.holders.get(item["id"]) == id:
                    del self.holders[item["id"]]
        return stored


class ResponseStore:
    """What was not used for longest goes first, and a response before those that it continues.

    For that, whoever uses a response uses all that it continues right after it. So what is missing
    of a conversation was deleted.
    """

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES):
        self._most = most
        self._most_bytes = most_bytes
        self._shelves: dict[str, _Shelf] = {}

    def add(self, tenant: str, id: str, stored: StoredResponse) -> None:
        """Keep a response, and forget old ones for it."""
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[id] = stored
        shelf.sizes[id] = stored.size
        shelf.size += shelf.sizes[id]
        shelf.holders |= {item["id"]: id for item in stored.input + stored.output}
        self._use(shelf, id)
        while len(shelf.responses) > self._most or shelf.size > self._most_bytes:
            shelf.remove(next(iter(shelf.responses)))

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.responses:
            return None
        self._use(shelf, id)
        return shelf.responses[id]

    def remove(self, tenant: str, id: str) -> StoredResponse | None:
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.remove(id)

    def history(self, tenant: str, id: str) -> list[Item] | None:
        """All items of a conversation up to a response's last; None when one of it is missing."""
        stored = self.get(tenant, id)
        if stored is None:
            return None
        before = self.before(tenant, stored)
        return None if before is None else before + stored.input + stored.output

    def before(self, tenant: str, stored: StoredResponse) -> list[Item] | None:
        """The items that a response's own input continues; None when one of them is missing."""
        if stored.previous is None:
            return []
        shelf = self._shelves.get(tenant)
        chain = (
            [] if shelf is None else [shelf.responses[id] for id in _chain(shelf, stored.previous)]
        )
        if not chain or chain[-1].previous is not None:
            return None
        return [item for each in reversed(chain) for item in each.input + each.output]

    def item(self, tenant: str, id: str) -> Item | None:
        """An item of any response, by its id."""
        shelf = self._shelves.get(tenant)
        holder = None if shelf is None else shelf.holders.get(id)
        stored = None if holder is None else self.get(tenant, holder)
        if stored is None:
            return None
        return next(item for item in stored.input + stored.output if item["id"] == id)

    @staticmethod
    def _use(shelf: _Shelf, id: str) -> None:
        for each in _chain(shelf, id):
            shelf.responses.move_to_end(each)


def _chain(shelf: _Shelf, id: str | None) -> Iterator[str]:
    """A response and those that it continues, as far as they are there."""
    while id is not None and (stored := shelf.responses.get(id)) is not None:
        yield id
        id = stored.previous
