"""The process of a rank other than 0: it runs the same worker as rank 0, on the same plans."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.executor.team.peer_main import enter_team
from asyncllm.executor.team.reports import Joining, Ready, ReportLine
from asyncllm.executor.team.status import PeerHeartbeat, PeerStatus
from asyncllm.models.served_spec import served_spec
from asyncllm.wire.messages import StepResult
from asyncllm.wire.ring import RingReader

log = logging.getLogger(__name__)


class TeamSettings(msgspec.Struct, frozen=True):
    """What all ranks of one machine start with.

    Attributes:
        folder: of the model.
        first, count: of the ranks on this machine.
        store: where ranks find each other, for ``parallel.group.open_store``.
        host: this machine's address; None if all ranks are on this machine.
        log_level: as a number.
    """

    config: EngineConfig
    folder: str
    first: int
    count: int
    store: int | tuple[str, int]
    host: str | None
    log_level: int


class PeerSettings(msgspec.Struct, frozen=True):
    """What a peer starts with.

    Attributes:
        ring: of ``RingWriter.fds_of``.
        reports: a socket's descriptor.
    """

    team: TeamSettings
    rank: int
    ring: tuple[int, int, int]
    reports: int


class RingChannel:
    """A ``Channel``: messages from the ring, results as reports."""

    def __init__(self, reader: RingReader, reports: ReportLine, heartbeat: PeerHeartbeat):
        self.heartbeat = heartbeat
        self._reader = reader
        self._reports = reports

    def receive(self, timeout: float | None = None) -> bytes | None:
        return self._reader.receive(timeout)

    def launched(self) -> None:
        pass  # no event loop shares this process

    def post(self, result: StepResult) -> None:
        self._reports.send_done(result)


def main() -> None:
    settings, status = enter_team(PeerSettings)
    logging.getLogger().setLevel(settings.team.log_level)
    reports = ReportLine(socket.socket(fileno=settings.reports))
    try:
        _run(settings, status, reports)
    except BaseException as error:
        log.exception("rank %d ends", settings.rank)
        reports.send_failure(error)
        sys.exit(1)


def _run(settings: PeerSettings, status: PeerStatus, reports: ReportLine) -> None:
    status.set("importing", -1)
    import torch

    from asyncllm.executor.build import build_worker
    from asyncllm.parallel.group import GroupRanks, join, open_store

    team, rank = settings.team, settings.rank

    def join_others(device: torch.device) -> GroupRanks:
        reports.send(Joining())
        status.set("joining the other ranks", -1)
        store = open_store(team.store, team.config.tp)
        ordered = team.config.deterministic
        ranks = join(store, rank, team.config.tp, device, team.host, ordered=ordered)
        status.set("loading", -1)
        return ranks

    folder = Path(team.folder)
    spec = served_spec(folder, team.config)
    worker = build_worker(
        team.config, folder, spec, rank=rank, ranks_here=team.count, join=join_others
    )
    reports.send(Ready())
    worker.run(RingChannel(RingReader(*settings.ring), reports, PeerHeartbeat(status)))


if __name__ == "__main__":
    main()
