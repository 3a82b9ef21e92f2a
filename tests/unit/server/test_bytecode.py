"""Whether Python compiles what a server imports at each start."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ASK = (
    "import asyncllm; from asyncllm.server.run import compiled_each_time;"
    "from asyncllm.server.run import why_not_kept;"
    "print(compiled_each_time(), why_not_kept())"
)


@pytest.mark.parametrize(
    ("variable", "options", "answer"),
    [
        ("", [], "[] their folder cannot be written to"),
        ("1", [], "['asyncllm'] PYTHONDONTWRITEBYTECODE is set"),
        ("", ["-B"], "['asyncllm'] Python runs with the option -B"),
    ],
)
def test_bytecode_that_is_not_kept_is_noticed_with_the_reason(
    tmp_path: Path, variable: str, options: list[str], answer: str
) -> None:
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env |= {"PYTHONDONTWRITEBYTECODE": variable}
    command = [sys.executable, *options, "-c", ASK]
    run = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, check=True)
    assert run.stdout.strip() == answer
