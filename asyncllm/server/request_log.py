"""RequestLog: recent requests by the names that clients know them by."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from asyncllm.engine.requests.history import KEPT_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Sequence


class Served:
    """One HTTP request, running or ended.

    Attributes:
        engine_ids: of its sequences, in the order of its choices; a beam search has none.
    """

    __slots__ = ("engine_ids",)

    def __init__(self, engine_ids: Sequence[int] = ()):
        self.engine_ids = engine_ids


class RequestLog:
    """Requests by tenant and name, so that tenants neither see nor overwrite each other's.

    A request has two names: its X-Request-Id, and the id of its answer. When a client uses a name
    again, it stands for the latest request.
    """

    def __init__(self, most: int = KEPT_REQUESTS) -> None:
        self._most = most
        self._by_name: dict[tuple[str, str], Served] = {}
        self._requests: deque[tuple[Served, list[tuple[str, str]]]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, tenant: str, names: Sequence[str], served: Served) -> None:
        """Remember a request, and forget the oldest when there are too many."""
        keys = [(tenant, name) for name in names if name]
        self._requests.append((served, keys))
        self._by_name.update(dict.fromkeys(keys, served))
        if len(self._requests) > self._most:
            oldest, keys = self._requests.popleft()
            for key in keys:
                if self._by_name.get(key) is oldest:
                    del self._by_name[key]

    def names(self) -> dict[int, str]:
        """The first name of each request, by the ids of its sequences; from any thread."""
        return {
            engine_id: keys[0][1]
            for served, keys in list(self._requests)
            for engine_id in list(served.engine_ids)
            if keys
        }

    def find(self, tenant: str, name: str) -> Served | None:
        return self._by_name.get((tenant, name))
