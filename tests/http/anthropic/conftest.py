from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import pytest

from tests.http.responses.test_responses import make_llm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.server.fake_llm import FakeLLM
    from tests.support.server.serving import Server


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    return make_llm


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as made:
        yield made
