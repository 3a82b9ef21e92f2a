"""Ports of servers in tests are nobody else's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.server import ports

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ("32768\t60999\n", range(10000, 32768)),
        ("1024 60999", range(61000, 65536)),
        ("10001 65535", range(10000, 65536)),
    ],
)
def test_no_connection_gets_one_by_chance(limits: str, left: range, tmp_path: Path) -> None:
    (tmp_path / "limits").write_text(limits)
    assert ports.outside(tmp_path / "limits") == left


def test_workers_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    shares: list[int] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        shares += ports.ports_of_worker(range(20000, 21000))
    assert shares == list(range(20000, 20999))
