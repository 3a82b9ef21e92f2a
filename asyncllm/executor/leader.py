"""Rank 0: its worker, and what decides when it captures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.executor.build import build_worker
from asyncllm.executor.sampling.token_constraint import Grammars
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.executor.team.station_messages import Machines
from asyncllm.executor.team.team import TeamLeader, lead_team
from asyncllm.executor.worker import CapturePace, Worker
from asyncllm.models.spec import ModelSpec
from asyncllm.wire.channel import Channel


class Leader:
    """Runs a worker without peers."""

    def __init__(self, worker: Worker):
        self._worker = worker

    @property
    def limits(self) -> EngineLimits:
        return self._worker.limits

    def run(self, channel: Channel) -> None:
        """As ``Worker.run``."""
        self._worker.run(CapturePace(channel, lambda: self._worker.has_captures))


def build_leader(
    config: EngineConfig,
    folder: Path,
    spec: ModelSpec,
    progress: Callable[[int, int], None],
    bill: StartupBill,
    grammars: Grammars[Any],
    await_kernels: Callable[[], None],
    machines: Machines | None,
) -> Leader | TeamLeader:
    """Load the model, on all ranks; the arguments are those of ``build_worker``.

    Args:
        machines: where the ranks are; None: all on this machine.

    Raises:
        ModelError: as ``build_worker`` does, or the model cannot be divided among the ranks.
    """
    build = partial(build_worker, config, folder, spec, progress, bill, grammars, await_kernels)
    if config.tp == 1:
        return Leader(build())
    here = None if machines is None else config.tp // machines.count
    build_rank = partial(build, ranks_here=here)
    return lead_team(config, folder, spec, lambda join: build_rank(join=join), machines)
