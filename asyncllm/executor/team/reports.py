"""What peers tell rank 0: each report is one packet of a socket."""

from __future__ import annotations

import socket

import msgspec

from asyncllm.wire.messages import StepResult

#: Of a packet. Errors are cut, and a result reports few copies.
MAX_BYTES = 64 << 10
_MAX_ERROR = 2000


class Joining(msgspec.Struct, tag=True, frozen=True):
    """The peer has started, and is about to join the other ranks."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The peer has its share of the model."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The peer ends."""

    error: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """A step is done on the peer; the fields are those of its ``StepResult``."""

    step: int
    failed: bool
    copied: tuple[tuple[int, float], ...]


Report = Joining | Ready | Failed | Done

_decode = msgspec.msgpack.Decoder(Report).decode
_encode = msgspec.msgpack.Encoder().encode


class ReportLine:
    """One end of the socket between rank 0 and a peer."""

    def __init__(self, end: socket.socket):
        self._end = end

    @classmethod
    def pair(cls) -> tuple[ReportLine, socket.socket]:
        """Rank 0's end, and the socket to hand to the peer."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(own), other

    def send(self, report: Report) -> None:
        """Waits while rank 0 has many reports to read."""
        self._end.send(_encode(report))

    def send_failure(self, error: BaseException) -> None:
        """Say why the peer ends."""
        self.send(Failed(str(error)[:_MAX_ERROR] or type(error).__name__))

    def send_done(self, result: StepResult) -> None:
        """Say that a step is done."""
        self.send(Done(result.step, result.error is not None, result.copied))

    def receive(self) -> Report | None:
        """The next report; waits for it. None once the peer has ended, or the line is cut."""
        return self._receive(0)

    def last_words(self) -> str | None:
        """Why the peer ended, if it has said so; does not wait."""
        while (report := self._receive(socket.MSG_DONTWAIT)) is not None:
            if isinstance(report, Failed):
                return report.error
        return None

    def cut(self) -> None:
        """Have ``receive`` return None in whatever thread it waits."""
        self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def _receive(self, flags: int) -> Report | None:
        try:
            packet = self._end.recv(MAX_BYTES, flags)
        except OSError:
            return None
        return _decode(packet) if packet else None
