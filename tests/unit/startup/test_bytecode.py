"""Whether Python compiles what a server imports at each start."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

ASK = "import asyncllm; from asyncllm.startup import bytecode; print(bytecode.compiled_each_time())"


@pytest.mark.parametrize(("kept", "answer"), [(True, "[]"), (False, "['asyncllm']")])
def test_bytecode_that_is_not_kept_is_noticed(tmp_path: Path, kept: bool, answer: str) -> None:
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env |= {"PYTHONDONTWRITEBYTECODE": "" if kept else "1"}
    run = subprocess.run([sys.executable, "-c", ASK], env=env, text=True, stdout=subprocess.PIPE)
    assert run.stdout.strip() == answer
