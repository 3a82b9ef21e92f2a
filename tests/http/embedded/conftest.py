"""A fake model in the test's own process, which must be idle when the test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.server.fake_llm import FakeLLM
from tests.support.server.polling import until_idle


@pytest.fixture
async def llm() -> AsyncIterator[FakeLLM]:
    fake = FakeLLM()
    await fake.start()
    yield fake
    await until_idle(fake)
    await fake.aclose()
