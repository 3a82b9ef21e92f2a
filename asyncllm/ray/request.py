"""Request: what the front sends to a replica."""

from __future__ import annotations

from typing import Final

import msgspec

#: What a replica's metadata has it as.
NUMBER: Final = "number"


class Request(msgspec.Struct, frozen=True):
    """An HTTP request as a whole.

    Attributes:
        target: path and query, as in a request line.
        path: as the client means it, without the query.
        peer: the client's host and port, as far as they are known.
        home: the number of the replica that has what it names, if one has.
    """

    method: bytes
    target: bytes
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    peer: tuple[str, int] | None
    home: int | None = None
