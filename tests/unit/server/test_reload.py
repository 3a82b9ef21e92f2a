"""A reload, and what would be known of it if the process died right now."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.server.reload import InForce, Options, Reloader
from asyncllm.server.service import Service
from asyncllm.server_config import ServerConfig


async def test_what_changes_is_remembered_before_it_shows(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
