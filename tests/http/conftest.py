from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.http.fake_llm import FakeLLM
from tests.http.serving import Server, ServerProcess, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    """Makes what ``server`` serves; a module may have its own."""
    return FakeLLM


@pytest.fixture(scope="module")
def server(new_llm: Callable[[], FakeLLM]) -> Iterator[Server]:
    """A fake server that the tests of one module share; it must end idle."""
    with serving(new_llm) as running:
        yield running
        running.until_idle()


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    """A server of the built-in model that the tests of one module share; it must end well."""
    running = ServerProcess("--cpu-threads", "1")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """Its /openapi.json."""
    found: dict[str, Any] = server.get("/openapi.json").json
    return found
