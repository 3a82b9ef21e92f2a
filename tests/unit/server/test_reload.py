"""A reload, and what would be known of it if the process died right now."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.server.reload import InForce, Options, Reloader
from asyncllm.server.service import Service


async def test_what_changes_is_remembered_before_it_shows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asyncllm")  # a reload sets it, and the test's end puts it back
    llm: Any = None  # names and keys do not depend on it
    old, new = (ServerConfig(served_model_name=(name,)) for name in ("old", "new"))
    service = Service(llm, old)
    reloader = Reloader(service)
    reloader.start = Options(EngineConfig(), old)
    reloader.read = lambda: Options(EngineConfig(), new)
    steps: list[tuple[str, ...]] = []

    def remember(data: bytes) -> None:
        steps.append((*service.model_names, *InForce.decode(data).config.served_model_name))

    reloader.remember = remember
    await reloader.reload()
    assert steps == [("old", "new")]
    assert service.model_names == ("new",)


async def test_whoever_asked_may_leave(caplog: pytest.LogCaptureFixture) -> None:
    """A reload that has begun goes on, and the next one waits for it."""
    caplog.set_level("INFO", "asyncllm")
    llm: Any = None
    configs = [ServerConfig(served_model_name=(name,)) for name in ("a", "b", "c")]
    service = Service(llm, configs[0])
    reloader, begun, go_on = Reloader(service), threading.Event(), threading.Event()
    remembered: list[tuple[str, ...]] = []

    def remember(data: bytes) -> None:
        begun.set()
        assert go_on.wait(10)
        remembered.append(InForce.decode(data).config.served_model_name)

    reloader.remember = remember
    reloader.start = Options(EngineConfig(), configs[0])
    reloader.read = lambda: Options(EngineConfig(), configs[1])
    first = asyncio.ensure_future(reloader.reload())
    await asyncio.to_thread(begun.wait, 10)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reloader.read = lambda: Options(EngineConfig(), configs[2])
    second = asyncio.ensure_future(reloader.reload())
    await asyncio.sleep(0)
    go_on.set()
    await second
    assert remembered == [("b",), ("c",)]
    assert service.model_names == ("c",)
