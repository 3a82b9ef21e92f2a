"""Rank 0's side of a tensor-parallel team: its peers, and what goes to and comes from them."""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
from torch._C._distributed_c10d import Store

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import EngineDead, ModelError
from asyncllm.executor.team.local import CLOSE_SECONDS, LocalRanks, MachineRanks
from asyncllm.executor.team.peer import TeamSettings
from asyncllm.executor.team.remote import RemoteRanks
from asyncllm.executor.team.reports import Done, Failed, Joining, Ready, Report
from asyncllm.executor.team.station_messages import Machines
from asyncllm.executor.worker import CapturePace, Worker
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.group import GroupRanks, host_store, join, open_store
from asyncllm.parallel.ranks import Apart, Ranks, RanksBroken, RanksDisagree
from asyncllm.wire.channel import Channel, ThreadChannel
from asyncllm.wire.heartbeat import Peer
from asyncllm.wire.messages import StepResult

R = TypeVar("R", bound=Report)

log = logging.getLogger(__name__)

#: A lost peer is noticed in many ways; the monitor, which knows why, may be a moment later.
REASON_SECONDS: Final = 2.0


class RankLost(EngineDead):
    """A peer is lost; the message says which, how it ended, and what it did last."""


class Team:
    """The peers of rank 0. Made and used in the executor thread, which must outlive them.

    Args:
        config: for all ranks; ``tp`` is their number.
        folder: of the model.
        machines: where they are; None: all on this one.

    Raises:
        RankLost: from any method, when a peer is lost.
    """

    def __init__(self, config: EngineConfig, folder: Path, machines: Machines | None):
        self._size = config.tp
        self._ordered = config.deterministic
        self._host = None if machines is None else machines.own
        self._ranks: GroupRanks | None = None
        self._loss: str | None = None
        self._losing = threading.Lock()
        self._lost = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._store_file = -1
        self._hosted: Store | None = None
        self._machines: list[MachineRanks] = []
        try:
            for machine in self._start(config, folder, machines):
                self._machines.append(machine)
            for machine in self._machines:
                machine.watch(self._on_lost)
        except BaseException:
            self.close(0.0)
            raise

    def _start(
        self, config: EngineConfig, folder: Path, machines: Machines | None
    ) -> Iterator[MachineRanks]:
        """The peers of each machine, which start at the same time."""
        where: int | tuple[str, int]
        if machines is None:
            where = self._store_file = os.memfd_create("asyncllm-ranks")
            count = self._size
        else:
            self._hosted, where = host_store(machines.own)
            count = self._size // machines.count
        level = log.getEffectiveLevel()
        if count > 1:
            settings = TeamSettings(config, str(folder), 0, count, where, self._host, level)
            yield LocalRanks(range(1, count), settings)
        if machines is None:
            return
        for number, address in enumerate(machines.stations, 1):
            first, host = number * count, address[0]
            settings = TeamSettings(config, str(folder), first, count, where, host, level)
            try:
                yield RemoteRanks(address, machines.token, settings)
            except OSError as error:
                raise RankLost(f"machine {host}, of rank {first}: {error}") from error

    @property
    def peers(self) -> Sequence[Peer]:
        """Those of all machines."""
        return [peer for machine in self._machines for peer in machine.peers]

    def join(self, device: torch.device) -> GroupRanks:
        """Wait until all peers have started, and join them."""
        self._reports(Joining)
        parts = self._take_store(), 0, self._size, device, self._host
        self._ranks = join(*parts, ordered=self._ordered)
        self._check()
        return self._ranks

    def _take_store(self) -> Store:
        """The store, for ``join`` alone: see ``GroupRanks.close``."""
        store, self._hosted = self._hosted, None
        return store or open_store(self._store_file, self._size)

    def await_ready(self) -> None:
        """Wait until all peers have their share of the model."""
        self._reports(Ready)

    def on_loss(self, wake: Callable[[], None]) -> None:
        """Set what is called, in another thread, when a peer is lost."""
        self._wake = wake

    def send(self, message: bytes) -> None:
        """Have all peers receive a message."""
        self._check()
        for machine in self._machines:
            machine.send(message)
        self._check()

    def end(self) -> None:
        """Have all peers end once they have received what was sent."""
        for machine in self._machines:
            machine.end()

    def done(self, step: int) -> list[Done]:
        """Wait until all peers are done with a step; their reports, in any order of ranks."""
        reports = self._reports(Done)
        assert all(report.step == step for report in reports), "peers report steps in order"
        return reports

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End all peers, and leave nothing behind. May be called again."""
        for machine in self._machines:
            machine.expect_end()
        if timeout > 0:
            self.end()  # on all machines at the same time
        for machine in self._machines:
            machine.close(timeout)
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self._hosted = None
        if self._store_file >= 0:
            os.close(self._store_file)
            self._store_file = -1

    def explain(self, error: Exception) -> Exception:
        """The cause of an error that a lost peer may have led to."""
        if isinstance(error, RankLost):
            return error
        if isinstance(error, RanksDisagree):
            return RankLost(str(error))
        self._lost.wait(REASON_SECONDS)
        return RankLost(self._loss or str(error))

    def _reports(self, kind: type[R]) -> list[R]:
        """The next report of each peer."""
        return [self._report(m, rank, kind) for m in self._machines for rank in m.ranks]

    def _report(self, machine: MachineRanks, rank: int, kind: type[R]) -> R:
        """The next report of a peer, which is of that kind unless the peer ends."""
        report = machine.receive(rank)
        if isinstance(report, kind):
            return report
        if isinstance(report, Failed):
            raise RankLost(f"rank {rank}: {report.error}")
        self._lost.wait(REASON_SECONDS)
        self._check()
        raise RankLost(f"rank {rank} has ended")

    def _check(self) -> None:
        if self._loss is not None:
            raise RankLost(self._loss)

    def _on_lost(self, rank: int, reason: str) -> None:
        """In another thread: get the executor thread out of whatever it waits for."""
        with self._losing:
            if self._loss is not None:  # which was the end of the others, too
                return
            [machine] = [each for each in self._machines if rank in each.ranks]
            words = machine.last_words(rank)
            self._loss = reason if words is None else f"{reason}: {words}"
        self._lost.set()
        log.error("%s", self._loss)
        for machine in self._machines:
            machine.kill()
        self._wake()
        if self._ranks is not None:
            self._ranks.abort()


#: Builds rank 0's worker, given what joins the ranks of a device.
BuildWorker = Callable[[Callable[[torch.device], Ranks]], Worker]


class TeamChannel:
    """A ``Channel`` whose messages go to the peers too, and whose results wait for theirs."""

    def __init__(self, channel: Channel, team: Team):
        self.heartbeat = channel.heartbeat
        self._channel = channel
        self._team = team
        #: By the plan of page copies: how long each rank took that has done them.
        self._copied: defaultdict[int, list[float]] = defaultdict(list)

    def receive(self, timeout: float | None = None) -> bytes | None:
        message = self._channel.receive(timeout)
        if message is None:
            self._team.end()
        else:
            self._team.send(message)
        return message

    def launched(self) -> None:
        self._channel.launched()

    def post(self, result: StepResult) -> None:
        reports = self._team.done(result.step)
        for report in reports:
            # Each rank that fails a step makes sure that the others do (``Ranks.agree``).
            assert report.failed == (result.error is not None)
        copied = self._copied_by_all([result.copied, *(report.copied for report in reports)])
        self._channel.post(msgspec.structs.replace(result, copied=copied))

    def _copied_by_all(
        self, copied: list[tuple[tuple[int, float], ...]]
    ) -> tuple[tuple[int, float], ...]:
        """The copies that the last rank has done now, each with the longest time."""
        for step, seconds in (copy for of_rank in copied for copy in of_rank):
            self._copied[step].append(seconds)
        done = [step for step, times in self._copied.items() if len(times) == len(copied)]
        return tuple((step, max(self._copied.pop(step))) for step in done)


class TeamLeader:
    """Runs rank 0's worker, and ends the team with it."""

    def __init__(self, worker: Worker, team: Team):
        self._worker = worker
        self._team = team

    @property
    def limits(self) -> EngineLimits:
        return self._worker.limits

    def run(self, channel: ThreadChannel) -> None:
        """As ``Worker.run``.

        Raises:
            RankLost: a peer is lost.
        """
        self._team.on_loss(channel.wake)
        channel.heartbeat.peers = self._team.peers
        paced = CapturePace(channel, lambda: self._worker.has_captures)
        try:
            self._worker.run(TeamChannel(paced, self._team))
        except BaseException as error:
            cause = self._team.explain(error) if isinstance(error, RanksBroken) else error
            self._team.close(0.0)  # everybody is told after this
            raise cause from (None if cause is error else error)
        self._team.close()


def lead_team(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    build: BuildWorker,
    machines: Machines | None,
) -> TeamLeader:
    """Start the peers, and build all ranks' workers at the same time.

    Raises:
        ModelError: the model cannot be divided among the ranks, one of them cannot serve its
            share, or a machine is lost.
    """
    # Before anything is started; on no device, and of the dtype that divides best.
    make_model(spec, torch.float32, torch.device("meta"), ranks=Apart(0, config.tp))
    try:
        team = Team(config, folder, machines)
    except RankLost as error:
        raise ModelError(str(error)) from error
    try:
        worker = build(team.join)
        team.await_ready()
    except (RanksBroken, RankLost) as error:
        cause = team.explain(error)
        team.close(0.0)
        raise ModelError(str(cause)) from error
    except BaseException:
        team.close(0.0)
        raise
    return TeamLeader(worker, team)
