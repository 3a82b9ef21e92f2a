from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.http.responses.test_responses import make_llm

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.server.fake_llm import FakeLLM


@pytest.fixture(scope="module")
def new_llm() -> Callable[[], FakeLLM]:
    return make_llm
