"""What a peer says that it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.executor.team.status import PeerStatus, new_status


def test_at_first_there_is_nothing() -> None:
    status = PeerStatus(new_status())
    assert str(status.read()) == "it had begun nothing"
    status.close()


def test_the_other_side_reads_it() -> None:
    fd = new_status()
    peer, parent = PeerStatus(os.dup(fd)), PeerStatus(fd)
    peer.set("all_reduce", 7)
    last = parent.read()
    assert last[:2] == ("all_reduce", 7)
    assert 0 <= time.monotonic() - last.at < 60
    assert "all_reduce of step 7, " in str(last)
    peer.close()
    assert parent.read() == last
    parent.close()


@given(st.text(min_size=1), st.integers(0, 2**63 - 1))
def test_any_text(operation: str, step: int) -> None:
    """The first 47 bytes of it are kept."""
    status = PeerStatus(new_status())
    status.set(operation, step)
    kept = operation.encode()[:47].decode(errors="replace")
    assert status.read()[:2] == (kept, step)
    status.close()


@given(st.binary(min_size=64, max_size=64))
def test_any_bytes_can_be_read(data: bytes) -> None:
    """As a write may be torn."""
    fd = new_status()
    status = PeerStatus(os.dup(fd))
    os.pwrite(fd, data, 0)
    os.close(fd)
    str(status.read())
    status.close()


WRITER = """
import sys
from asyncllm.executor.team.status import PeerStatus

status = PeerStatus(int(sys.argv[1]))
for step in range(1, 200_000):
    status.set(f"operation {step}", step)
"""


def test_what_is_read_is_never_half_written() -> None:
    fd = new_status()
    status = PeerStatus(os.dup(fd))
    with subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd]) as writer:
        os.close(fd)
        seen = set()
        while writer.poll() is None:
            operation, step, at = status.read()
            seen.add(step)
            assert (operation, at > 0) == ((f"operation {step}", True) if step else ("", False))
        assert writer.returncode == 0
    assert len(seen) > 10
    status.close()
