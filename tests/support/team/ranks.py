"""The processes of ranks that this process's engines have started."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

PEER = "asyncllm.executor.team.peer"


def peers(pid: int | None = None) -> list[psutil.Process]:
    """Those of any depth below a process; this one by default."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if PEER in _command(child)]


def plant(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of ranks run a program first."""
    lines = textwrap.indent(textwrap.dedent(program), "    ")
    guard = f"import sys\nif {PEER!r} in sys.orig_argv:\n"
    (folder / "sitecustomize.py").write_text(guard + lines)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it has just ended
        return []
    return command
