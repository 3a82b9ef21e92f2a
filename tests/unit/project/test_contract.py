"""Every line of the published contract names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NUM_LINES = 11


def lines() -> list[str]:
    """Each line of the contract, with its heading."""
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:]


def test_they_are_numbered() -> None:
    assert [int(line.split(".")[0]) for line in lines()] == list(range(1, NUM_LINES + 1))


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.split(".")[0])
def test_a_line_has_tests(line: str) -> None:
    promise, _, named = line.partition("\nTests: ")
    assert len(promise.splitlines()) > 2
    files = re.findall(r"`(tests/\S+/test_\w+\.py)`", named)
    assert files
    assert re.sub(r"`\S+`", "", named).strip(" ,\n") == "", "only files stand there"
    for name in files:
        text = (ROOT / name).read_text("utf-8")
        assert re.search(r"^((async )?def test_|Test\w+ = )", text, re.MULTILINE), name


def test_each_line_is_tested_on_a_real_socket() -> None:
    for line in lines():
        assert re.search(r"tests/http/(contract|process|hostile)/", line), line.splitlines()[0]
