"""A peer without a model: it gets messages from a ring, and does what they say."""

from __future__ import annotations

import ctypes
import logging
import os
import time

import msgspec

from asyncllm.executor.team.peer_main import enter_team
from asyncllm.wire.ring import RingReader


class PeerSettings(msgspec.Struct, frozen=True):
    """What the peer starts with.

    Attributes:
        ring: of ``RingWriter.fds_of``.
        ready: a descriptor; the peer writes a byte there when it listens, and for each message.
        padding: so that settings can be large.
    """

    ring: tuple[int, int, int]
    ready: int
    padding: str = ""


def main() -> None:
    settings, status = enter_team(PeerSettings)
    reader = RingReader(*settings.ring)
    os.write(settings.ready, b"r")
    step = 0
    while (message := reader.receive()) is not None:
        step += 1
        status.set(message.decode(), step)
        if message == b"outlive the thread":
            ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG
        elif message == b"log":
            logging.getLogger("peer").warning("hello")
        elif message == b"exit 3":
            os._exit(3)
        os.write(settings.ready, b"m")
        if message == b"hang":
            time.sleep(600)


if __name__ == "__main__":
    main()
