"""Building a worker on a CPU."""

from __future__ import annotations

from pathlib import Path

from asyncllm import demo
from asyncllm.config import EngineConfig
from asyncllm.executor.build import build_worker
from asyncllm.models.spec import read_spec


def test_kernels_that_do_not_run_here_are_not_awaited() -> None:
    folder = Path(demo.path())
    waits: list[None] = []
    config = EngineConfig(device="cpu", max_model_len=64, max_num_seqs=2)
    worker = build_worker(
        config, folder, read_spec(folder), await_kernels=lambda: waits.append(None)
    )
    assert worker.limits.max_num_seqs == 2
    assert waits == []
