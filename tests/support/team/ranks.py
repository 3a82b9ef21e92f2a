"""The processes of this process's engines."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

RANK_ZERO = "asyncllm.executor.process.main"
OTHER_RANKS = "asyncllm.executor.team.peer"


def peers(pid: int | None = None) -> list[psutil.Process]:
    """The processes of ranks 1 and up, of any depth below a process; this one by default."""
    return _running(OTHER_RANKS, pid)


def executors(pid: int | None = None) -> list[psutil.Process]:
    """The processes of ranks 0, likewise."""
    return _running(RANK_ZERO, pid)


def plant(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of ranks run a program first."""
    lines = textwrap.indent(textwrap.dedent(program), "    ")
    guard = f"import sys\nif {{{RANK_ZERO!r}, {OTHER_RANKS!r}}}.intersection(sys.orig_argv):\n"
    (folder / "sitecustomize.py").write_text(guard + lines)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def _running(module: str, pid: int | None) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if module in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it has just ended
        return []
    return command
