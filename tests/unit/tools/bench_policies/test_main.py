"""The script as a whole."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools.bench_policies.__main__ import main


@pytest.mark.slow
def test_a_load_is_served_and_printed_beside_its_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    args = ["--hostile", "interfere", "--policies", "fair", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_policies", *args])
    main()
    assert re.search(r"fair, prompts +40 +\d(.|\n)*SRPT bound +72 +\d", capsys.readouterr().out)
    assert json.loads(out.read_text())["interfere"]["fair"]["requests"] == 72
