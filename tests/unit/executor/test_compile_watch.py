"""Which compilations are reported, and when."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.executor.compile_watch import CompileWatch
from asyncllm.wire.heartbeat import Heartbeat


def heard(watch: CompileWatch, name: str, *, cache_hit: bool, seconds: float = 0.5) -> None:
    """As Triton tells of a kernel."""
    times: Any = SimpleNamespace(total=round(seconds * 1e6))
    watch._on_kernel(
        metadata={"name": name}, times=times, cache_hit=cache_hit, src=None, metadata_group={}
    )


def test_start_up_is_summed_up_and_serving_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncllm")
    watch = CompileWatch()
    for name in ("gemv", "gemv", "norm"):
        heard(watch, name, cache_hit=False)
    heard(watch, "decode", cache_hit=True)
    assert not caplog.records
    watch.start_serving()
    [summary] = caplog.records
    assert summary.levelno == logging.INFO
    assert "2 gemv, 1 norm compiled and 1 found" in summary.message

    heard(watch, "extend", cache_hit=True)
    heard(watch, "filter", cache_hit=False, seconds=1.75)
    [_, warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "kernel filter was compiled in 1.75 s while serving" in warning.message


def test_nothing_is_said_where_nothing_was_compiled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncllm")
    watch = CompileWatch()
    heard(watch, "decode", cache_hit=True)
    watch.start_serving()
    assert not caplog.records


def test_the_heartbeat_is_told_of_compilations_in_the_same_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = pytest.importorskip("triton").knobs
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, name, None)
    watch, heartbeat = CompileWatch(), Heartbeat()
    watch.report_to(heartbeat)
    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    heartbeat.enter("launch", 7)
    assert before(key="k", fn=None) is False, "the kernel is compiled all the same"
    assert heartbeat.operation[::2] == ("compile", 7)
    after(key="k", fn=None)
    assert heartbeat.operation[::2] == ("launch", 7)
    other = threading.Thread(target=before)
    other.start()
    other.join()
    assert heartbeat.operation.name == "launch"
