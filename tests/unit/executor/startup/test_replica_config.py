"""What each of several replicas runs with."""

from __future__ import annotations

import pytest

from asyncllm.config import EngineConfig
from asyncllm.executor.startup import replica_config as module
from asyncllm.executor.startup.replica_config import replica_config


def test_each_has_its_own_gpus() -> None:
    config = EngineConfig(device="cuda:1", tp=2, dp=3, trace="t.gz")
    found = [replica_config(config, i) for i in range(3)]
    assert [one.device for one in found] == ["cuda:1", "cuda:3", "cuda:5"]
    assert {(one.dp, one.tp) for one in found} == {(1, 2)}
    assert [one.trace for one in found] == ["t.gz.0", "t.gz.1", "t.gz.2"]


def test_the_cpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    for device in ("cpu", "auto"):
        monkeypatch.setattr(module, "find_gpu", lambda _: None)
        found = replica_config(EngineConfig(device=device, dp=2), 1)
        assert (found.device, found.cpu_threads) == ("cpu", 3)
    assert replica_config(EngineConfig(device="cpu", dp=9), 1).cpu_threads == 1
    assert replica_config(EngineConfig(device="cpu", dp=2, cpu_threads=5), 1).cpu_threads == 5
    assert replica_config(EngineConfig(device="sim", dp=2), 1).device == "sim"
    monkeypatch.setattr(module, "find_gpu", lambda _: object())
    assert replica_config(EngineConfig(dp=2), 1).device == "cuda:1"


def test_one_replica_is_the_engine_itself() -> None:
    config = EngineConfig()
    assert replica_config(config, 0) is config
