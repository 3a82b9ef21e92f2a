"""The peers of this process's engines."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]


def peers(pid: int | None = None) -> list[psutil.Process]:
    """The processes of ranks 1 and up, of any depth below a process; this one by default."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "asyncllm.executor.team.peer" in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:  # it has just ended
        return []
    return command
