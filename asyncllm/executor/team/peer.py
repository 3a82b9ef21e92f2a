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
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import StepResult
from asyncllm.wire.ring_reader import RingReader

log = logging.getLogger(__name__)


class PeerSettings(msgspec.Struct, frozen=True):
    """What a peer starts with.

    Attributes:
        ring: of ``RingWriter.fds_of``.
        reports: a socket's descriptor.
        store: of the memfd of ``parallel.group.open_store``.
        log_level: as a number.
    """

    config: EngineConfig
    folder: str
    rank: int
    ring: tuple[int, int, int]
    reports: int
    store: int
    log_level: int


class RingChannel:
    """A ``Channel``: messages from the ring, results as reports."""

    def __init__(self, reader: RingReader, reports: ReportLine, heartbeat: PeerHeartbeat):
        self.heartbeat = heartbeat
        self._reader = reader
        self._reports = reports

    def receive(self, timeout: float | None = None) -> bytes | None:
        return self._reader.receive(timeout)

    def post(self, result: StepResult) -> None:
        self._reports.send_done(result)


def main() -> None:
    settings, status = enter_team(PeerSettings)
    logging.getLogger().setLevel(settings.log_level)
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

    config, rank = settings.config, settings.rank

    def join_others(device: torch.device) -> GroupRanks:
        reports.send(Joining())
        status.set("joining the other ranks", -1)
        ranks = join(open_store(settings.store, config.tp), rank, config.tp, device)
        status.set("loading", -1)
        return ranks

    folder = Path(settings.folder)
    worker = build_worker(config, folder, read_spec(folder), rank=rank, join=join_others)
    reports.send(Ready())
    worker.run(RingChannel(RingReader(*settings.ring), reports, PeerHeartbeat(status)))


if __name__ == "__main__":
    main()
