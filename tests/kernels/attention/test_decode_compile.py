"""What decode programs do before the kernels before them have finished, as they are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")


@pytest.mark.skipif(DEVICE != "cpu", reason="compiles for a GPU that is not here")
def test_first_tiles_are_on_their_way_before_the_wait(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    modules = "decode", "decode_heads"
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.launches", "9.0a", *modules],
        env=environment,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        check=True,
    )
    for kernels in json.loads(process.stdout).values():
        (_, _, ptx, _), *overlapping = kernels
        before, wait, _ = ptx.partition("griddepcontrol.wait")
        assert wait
        assert before.count("cp.async.commit_group") >= 2  # K and V
        for _, _, other, _ in overlapping:
            # Only the extra row waits, and it does nothing else.
            before, *after = other.split("griddepcontrol.wait")
            assert len(after) == 1
            assert "cp.async" not in before
