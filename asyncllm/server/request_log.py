"""RequestLog: live and recent requests by the names that clients know them by."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from asyncllm.engine.requests.history import KEPT_REQUESTS

#: Sequences of ended requests to remember; the engine remembers far fewer.
MOST_SEQUENCES: Final = 2**16


class Served:
    """One HTTP request, running or ended.

    Attributes:
        came: when it was logged, by ``time.time``, which several machines agree on.
        engine_ids: of its sequences, in the order of its choices; a beam search has none.
        tenant: whose it is.
        names: its X-Request-Id, and the id of its answer if that has one; empty until it is logged.
    """

    __slots__ = ("came", "engine_ids", "names", "tenant")

    def __init__(self, engine_ids: Sequence[int] = ()):
        self.came = 0.0
        self.engine_ids = engine_ids
        self.tenant = ""
        self.names: tuple[str, ...] = ()


class RequestLog:
    """Requests by tenant and name, so that tenants neither see nor overwrite each other's.

    A request has two names: its X-Request-Id, and the id of its answer. When a client uses a name
    again, it stands for the latest request.
    """

    def __init__(self, most: int = KEPT_REQUESTS) -> None:
        """``most``: ended requests to remember; those that live are not forgotten."""
        self._most = most
        self._num_sequences = 0  # of those that have ended
        self._by_name: dict[tuple[str, str], Served] = {}
        self._by_engine_id: dict[int, Served] = {}
        self._ended: deque[Served] = deque()

    def __len__(self) -> int:
        """How many requests have ended and are remembered."""
        return len(self._ended)

    def add(self, tenant: str, names: Sequence[str], served: Served) -> None:
        """Remember a request whose sequences were submitted."""
        served.came = time.time()
        served.tenant, served.names = tenant, tuple(name for name in names if name)
        self._by_name.update(dict.fromkeys(_keys(served), served))
        self._by_engine_id.update(dict.fromkeys(served.engine_ids, served))

    def ended(self, served: Served) -> None:
        """A request has ended; of these, the oldest is forgotten when there are too many."""
        if not served.names:
            return  # it was refused
        self._ended.append(served)
        self._num_sequences += len(served.engine_ids)
        while len(self._ended) > self._most or (
            self._num_sequences > MOST_SEQUENCES and len(self._ended) > 1
        ):
            oldest = self._ended.popleft()
            self._num_sequences -= len(oldest.engine_ids)
            for key in _keys(oldest):
                if self._by_name.get(key) is oldest:
                    del self._by_name[key]
            for engine_id in oldest.engine_ids:
                self._by_engine_id.pop(engine_id, None)

    def names(self) -> dict[int, str]:
        """The first name of each request, by the ids of its sequences; from any thread."""
        known = self._by_engine_id.copy().items()
        return {engine_id: served.names[0] for engine_id, served in known if served.names}

    def find(self, tenant: str, name: str) -> Served | None:
        return self._by_name.get((tenant, name))

    def find_sequence(self, engine_id: int) -> Served | None:
        """The request that a sequence of the engine belongs to."""
        return self._by_engine_id.get(engine_id)


def _keys(served: Served) -> list[tuple[str, str]]:
    return [(served.tenant, name) for name in served.names]
