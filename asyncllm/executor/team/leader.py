"""Rank 0 of a tensor-parallel team: its worker, and the channel that it shares with its peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.capture_pace import CapturePace
from asyncllm.executor.team.machines import Machines
from asyncllm.executor.team.team import RankLost, Team
from asyncllm.executor.worker import Worker
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Apart, Ranks, RanksBroken
from asyncllm.wire.channel import Channel, LeaderChannel
from asyncllm.wire.messages import StepResult

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

    def run(self, channel: LeaderChannel) -> None:
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
    machines: Machines | None = None,
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
