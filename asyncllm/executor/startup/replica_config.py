"""The configuration of one of several replicas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from asyncllm.kernels.cuda_driver import find_gpu

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig


def replica_config(config: EngineConfig, replica: int) -> EngineConfig:
    """What replica ``replica`` of ``config.dp`` runs with: its own GPUs, or its share of the CPUs.

    The first one has the GPUs from that of ``device`` on, the next one those after them.
    """
    if config.dp == 1:
        return config
    changes: dict[str, object] = {"dp": 1}
    if config.trace is not None:
        changes["trace"] = f"{config.trace}.{replica}"
    if config.kv_events is not None:  # each has two ports
        address, _, port = config.kv_events.rpartition(":")
        changes["kv_events"] = f"{address}:{int(port) + 2 * replica}"
    device = config.device
    if device == "auto" and find_gpu(0) is None:
        device = "cpu"
    if device == "cpu":
        changes["device"] = device
        if config.cpu_threads is None:
            changes["cpu_threads"] = max(1, _cpu_threads() // (config.dp * config.tp))
    elif device != "sim":
        changes["device"] = f"cuda:{(config.gpu or 0) + replica * config.tp}"
    return msgspec.structs.replace(config, **changes)


def _cpu_threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else len(os.sched_getaffinity(0))
