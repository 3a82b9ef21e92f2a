"""The name of this machine."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from pathlib import Path


def describe(device: str) -> str:
    """The GPU models if ``device`` is "cuda", otherwise the CPU model."""
    names = _gpus() if device == "cuda" else []
    return ", ".join(dict.fromkeys(names)) or _cpu()


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [line.strip() for line in run.stdout.splitlines() if line.strip()]
    return []


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
