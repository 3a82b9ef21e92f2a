"""RequestLog: what the engine calls the requests that were served lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from asyncllm.engine.history import KEPT_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What the ids of answers begin with; the X-Request-Id follows.
ID_PREFIXES = ("chatcmpl-", "cmpl-")


class RequestLog:
    """By tenant and X-Request-Id, so that tenants neither see nor overwrite each other's.

    An id that a client uses again names its latest request.
    """

    def __init__(self, most: int = KEPT_REQUESTS) -> None:
        self._most = most
        self._engine_ids: OrderedDict[tuple[str, str], Sequence[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engine_ids)

    def add(self, tenant: str, request_id: str, engine_ids: Sequence[int]) -> None:
        """Remember a request, and forget the oldest when there are too many."""
        self._engine_ids.pop((tenant, request_id), None)
        self._engine_ids[tenant, request_id] = engine_ids
        if len(self._engine_ids) > self._most:
            self._engine_ids.popitem(last=False)

    def find(self, tenant: str, name: str) -> Sequence[int]:
        """The engine's ids of a request's sequences, in the order of its choices; or none.

        Args:
            name: the request's X-Request-Id, or the id of its answer.
        """
        plain = (name.removeprefix(prefix) for prefix in ID_PREFIXES if name.startswith(prefix))
        for request_id in (name, *plain):
            if found := self._engine_ids.get((tenant, request_id)):
                return found
        return ()
