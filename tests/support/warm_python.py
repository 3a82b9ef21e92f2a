"""Runs scripts in forks of a process that has imported torch: importing it is most of what a short
script takes.

As a program, it imports the modules that its arguments name, and runs a script for each line of
stdin. Each line of stdout is an exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any


class WarmPython(ExitStack):
    """Args:
    modules: that the scripts find imported.
    env: the environment of all scripts.
    """

    def __init__(self, *modules: str, env: dict[str, str]):
        super().__init__()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            env=env,
            cwd=Path(__file__).parents[2],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._process = self.enter_context(process)

    def run(
        self, script: Path, args: Sequence[str], cwd: Path, seconds: int
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, or for so many seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = cwd / ".stdout", cwd / ".stderr"
        run = [str(script), *args], str(cwd), str(out), str(err), seconds
        print(json.dumps(run), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())


def _main(argv: list[str], cwd: str, out: str, err: str, seconds: int) -> Any:
    """What the child does instead of reading stdin on."""
    signal.alarm(seconds)
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    gc.freeze()  # a fork shares the memory that its collections do not touch
    for line in iter(sys.stdin.readline, ""):
        if (child := os.fork()) == 0:
            _main(*json.loads(line))
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
