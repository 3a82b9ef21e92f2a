"""The hooks of pre-commit are the checks of ``make lint``."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]


def test_the_hooks_run_what_lint_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\nlint: style types\n" in makefile
    recipes = re.findall(r"^(?:style|types):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert len(recipes) == 2
    lines = "".join(recipes).splitlines()
    commands = [line.strip().replace("$(VENV)", ".venv") for line in lines]
    config = msgspec.yaml.decode((ROOT / ".pre-commit-config.yaml").read_bytes())
    hooks = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    assert sorted(hooks) == sorted(commands)
