"""A few hundred of ``random_cases``: CONTRIBUTING names the command for ten thousand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cpu.llm.random_cases import FAMILIES, run

pytestmark = pytest.mark.slow


async def test_no_answer_depends_on_more_than_its_prompt(folder_of: Callable[[str], Path]) -> None:
    happened = await run({family: folder_of(family) for family in FAMILIES}, 300)
    assert min(happened[what] for what in ("aborted", "preempted", "used", "from host")) > 10
