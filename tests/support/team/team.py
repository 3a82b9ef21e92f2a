"""Peers without a model, and the ring to them."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from asyncllm.executor.team.process import PeerProcess, close_peers
from asyncllm.wire.ring import RingWriter
from tests.support.team.peer import PeerSettings


class Team:
    """``size`` peers, ranks 1 and up, that listen when this is entered."""

    def __init__(self, size: int, padding: str = ""):
        self.writer = RingWriter(size)
        self._read_end, ready = os.pipe()
        self.peers = []
        for i in range(size):
            fds = self.writer.fds_of(i)
            settings = PeerSettings(fds, ready, padding)
            module = "tests.support.team.peer"
            self.peers.append(PeerProcess(i + 1, module, settings, (*fds, ready)))
        os.close(ready)

    def __enter__(self) -> Self:
        self._confirm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, message: str) -> None:
        """Have all do it; returns when they have begun."""
        self.writer.send(message.encode())
        self._confirm()

    def close(self, timeout: float = 60.0) -> None:
        self.writer.close()
        close_peers(self.peers, timeout)
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1

    def _confirm(self) -> None:
        for _ in self.peers:
            assert os.read(self._read_end, 1), "a peer has ended"
