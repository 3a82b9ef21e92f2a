"""What rank 0 and a station on another machine tell each other, over one ``wire.tcp.TcpLink``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from asyncllm.executor.team.peer import TeamSettings
from asyncllm.executor.team.reports import Report
from asyncllm.executor.team.status import LastOperation

#: A station says what its ranks do, this often.
BEAT_SECONDS = 0.5
#: After this long without a word, a machine is lost.
SILENCE_SECONDS = 5.0


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


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start ranks: rank 0's first message.

    Attributes:
        version: of asyncllm, on rank 0's machine.
        settings: of the station's ranks; its ``folder`` is that of rank 0's machine.
    """

    version: str
    settings: TeamSettings


class Message(msgspec.Struct, tag=True, frozen=True):
    """Have all ranks receive this message of a ``Channel``."""

    content: bytes


class End(msgspec.Struct, tag=True, frozen=True):
    """Have all ranks end once they have received what was sent."""


class PrintStacks(msgspec.Struct, tag=True, frozen=True):
    """Have a rank write the stacks of its threads to stderr."""

    rank: int


class Told(msgspec.Struct, tag=True, frozen=True):
    """What a rank reports."""

    rank: int
    report: Report


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended, so that no further report of it comes."""

    rank: int


class Lost(msgspec.Struct, tag=True, frozen=True):
    """A rank is lost: how it ended and what it did last. Its reports have come before."""

    rank: int
    reason: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The station cannot start its ranks."""

    reason: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """What each rank does.

    Attributes:
        operations: of each rank, in their order: the operation, its step, and how many seconds ago
            it began.
    """

    operations: tuple[tuple[str, int, float], ...]

    @classmethod
    def of(cls, operations: list[LastOperation]) -> Beat:
        now = time.monotonic()
        return cls(tuple((each.operation, each.step, now - each.at) for each in operations))

    def last_operations(self, before: Sequence[LastOperation]) -> list[LastOperation]:
        """With times of this machine's clock; messages are under way for next to no time.

        Args:
            before: the last ones. What a rank still does keeps its time, to the bit.
        """
        now = time.monotonic()
        found = [LastOperation(name, step, now - ago) for name, step, ago in self.operations]
        return [old if _is_same(old, new) else new for old, new in zip(before, found, strict=True)]


def _is_same(old: LastOperation, new: LastOperation) -> bool:
    return old[:2] == new[:2] and abs(old.at - new.at) < BEAT_SECONDS


encode = msgspec.msgpack.Encoder().encode
#: What a station receives.
decode_order = msgspec.msgpack.Decoder(Start | Message | End | PrintStacks).decode
#: What rank 0 receives.
decode_news = msgspec.msgpack.Decoder(Told | Ended | Lost | Refused | Beat).decode
