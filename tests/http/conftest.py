from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from asyncllm import AsyncLLM
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    """Makes what ``server`` serves; a folder or a module may have its own."""
    return FakeLLM


@pytest.fixture(scope="module")
def server(new_llm: Callable[[], FakeLLM]) -> Iterator[Server]:
    """A fake server that the tests of one module share; it must end idle."""
    with serving(new_llm) as running:
        yield running
        running.until_idle()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def _demo() -> Iterator[Server]:
    with serving(lambda: AsyncLLM(device="cpu", cpu_threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def demo(_demo: Server) -> Iterator[Server]:
    """A server of the built-in model that modules share; each must leave it idle.

    It runs in this process, which has loaded torch already. ``asyncllm serve`` in a process of its
    own is ``ServerProcess``.
    """
    yield _demo
    _demo.until_idle()


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    """Its /openapi.json."""
    found: dict[str, Any] = server.get("/openapi.json").json
    return found
