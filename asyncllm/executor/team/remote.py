"""Ranks on another machine, which a station starts and watches there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from asyncllm.executor.team.peer import TeamSettings
from asyncllm.executor.team.reports import Failed, Report
from asyncllm.executor.team.station_messages import (
    SILENCE_SECONDS,
    Beat,
    End,
    Ended,
    Lost,
    Message,
    PrintStacks,
    Start,
    Told,
    decode_news,
    encode,
)
from asyncllm.executor.team.status import LastOperation, operation_of
from asyncllm.version import __version__
from asyncllm.wire.heartbeat import Operation, Peer
from asyncllm.wire.tcp import connect

#: How long a station may take to end ranks that it kills.
_KILL_SECONDS: Final = 5.0


class RemoteRanks:
    """``MachineRanks`` of another machine, over a connection to its station.

    Args:
        address: of the station.
        token: see ``Machines``.
        settings: for the ranks there.

    Raises:
        OSError: there is no such station.
    """

    def __init__(self, address: tuple[str, int], token: bytes, settings: TeamSettings):
        self.ranks = range(settings.first, settings.first + settings.count)
        self._where = f"machine {address[0]}"
        self._closing = False
        self._told_to_end = False
        self._last = [LastOperation("", -1, time.monotonic()) for _ in self.ranks]
        self._reports: dict[int, SimpleQueue[Report | None]]
        self._reports = {rank: SimpleQueue() for rank in self.ranks}
        self._reader: threading.Thread | None = None
        self._link = connect(address, token)
        self._link.send(encode(Start(__version__, settings)))

    @property
    def peers(self) -> Sequence[Peer]:
        return [_RemotePeer(rank, self) for rank in self.ranks]

    def last_operation(self, rank: int) -> LastOperation:
        """What a rank did, half a second ago at most."""
        return self._last[rank - self.ranks.start]

    def print_stacks(self, rank: int) -> None:
        """Have a rank write the stacks of its threads to its stderr."""
        self._link.send(encode(PrintStacks(rank)))

    def watch(self, on_lost: Callable[[int, str], None]) -> None:
        name = "asyncllm-station"
        self._reader = threading.Thread(target=self._read, args=(on_lost,), name=name, daemon=True)
        self._reader.start()

    def send(self, message: bytes) -> None:
        self._link.send(encode(Message(message)))

    def end(self) -> None:
        if not self._told_to_end:
            self._told_to_end = True
            self._link.send(encode(End()))

    def receive(self, rank: int) -> Report | None:
        report = self._reports[rank].get()
        if report is None:
            self._reports[rank].put(None)  # for the next call
        return report

    def last_words(self, rank: int) -> str | None:
        with suppress(Empty):  # another thread may receive them, too
            while (report := self._reports[rank].get_nowait()) is not None:
                if isinstance(report, Failed):
                    return report.error
            self._reports[rank].put(None)
        return None

    def kill(self) -> None:
        self._closing = True
        self._link.finish()  # which ends the ranks there
        self._end_reports()

    def expect_end(self) -> None:
        self._closing = True

    def close(self, timeout: float) -> None:
        self._closing = True
        if timeout > 0:
            self.end()
        self._link.finish()
        if self._reader is not None:
            self._reader.join(timeout + _KILL_SECONDS)
        self._link.close()

    def _read(self, on_lost: Callable[[int, str], None]) -> None:
        """Receive until the connection ends; in a thread of its own."""
        how = ": its station has ended"
        try:
            while (message := self._link.receive(SILENCE_SECONDS)) is not None:
                news = decode_news(message)
                if isinstance(news, Told):
                    self._reports[news.rank].put(news.report)
                elif isinstance(news, Ended):
                    self._reports[news.rank].put(None)
                elif isinstance(news, Beat):
                    self._last = news.last_operations(self._last)
                elif not self._closing:
                    rank = news.rank if isinstance(news, Lost) else self.ranks.start
                    on_lost(rank, f"{self._where}: {news.reason}")
        except TimeoutError:
            how = f" has not been heard of for {SILENCE_SECONDS:g} s"
        if not (self._closing or self._told_to_end):
            each = zip(self.ranks, self._last, strict=True)
            did = "; ".join(f"rank {rank}: {last}" for rank, last in each)
            on_lost(self.ranks.start, f"{self._where}{how}; {did}")
        self._end_reports()

    def _end_reports(self) -> None:
        for reports in self._reports.values():
            reports.put(None)


class _RemotePeer:
    """``wire.heartbeat.Peer`` on another machine."""

    def __init__(self, rank: int, ranks: RemoteRanks):
        self.rank = rank
        self._ranks = ranks

    def operation(self) -> Operation:
        return operation_of(self._ranks.last_operation(self.rank))

    def print_stacks(self) -> None:
        self._ranks.print_stacks(self.rank)
