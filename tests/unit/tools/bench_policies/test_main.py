"""The script as a whole."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tools.bench_policies.__main__ import arguments, main


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


@pytest.mark.parametrize("limit", ["0", "-1", "0.5", "inf", "1e3", "many"])
def test_a_number_of_requests_is_positive_and_whole(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments().parse_args(["some.log", f"--limit={limit}"])
    assert ended.value.code == 2
    assert "argument --limit: " in capsys.readouterr().err
