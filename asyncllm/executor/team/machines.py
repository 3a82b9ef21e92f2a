"""Where the ranks of a model are, when one machine does not have all of them."""

from __future__ import annotations

import msgspec


class Machines(msgspec.Struct, frozen=True):
    """The machine of rank 0, and the stations on the others. Each has as many ranks.

    Attributes:
        own: the address of rank 0's machine, at which the others reach it.
        stations: host and port of each; the first one's ranks follow those of rank 0's machine.
        token: what the stations know rank 0 by (``wire.tcp``).
    """

    own: str
    stations: tuple[tuple[str, int], ...]
    token: bytes

    @property
    def count(self) -> int:
        return 1 + len(self.stations)
