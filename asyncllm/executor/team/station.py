"""A station: on another machine than rank 0's, it does for rank 0 what that does for its own peers.

It starts the ranks of its machine, watches them, hands them what rank 0 sends, and tells rank 0
what they report. It serves one team, and ends with it: also when rank 0 or its machine is lost.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import msgspec

from asyncllm.errors import ModelError
from asyncllm.executor.team.local import CLOSE_SECONDS, LocalRanks
from asyncllm.executor.team.peer import TeamSettings
from asyncllm.executor.team.station_messages import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    Beat,
    Ended,
    Lost,
    Message,
    PrintStacks,
    Refused,
    Start,
    Told,
    decode_order,
    encode,
)
from asyncllm.executor.team.status import LastOperation
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.version import __version__
from asyncllm.wire.tcp import TcpLink, accept

#: How long the last reports of ranks that have ended take to pass on.
_REPORT_SECONDS: Final = 1.0


def run_station(listening: socket.socket, token: bytes) -> None:
    """Wait for rank 0, and serve it; returns when nothing is left here of its team.

    Args:
        listening: of ``wire.tcp.listen``; closed once rank 0 has come.
        token: what rank 0 is known by.
    """
    with listening:
        link = accept(listening, token)
    link.give_up_after(SILENCE_SECONDS)
    with closing(link):
        if (message := link.receive()) is not None:
            start = decode_order(message)
            assert isinstance(start, Start), "rank 0 begins with it"
            _Station(link, start).run()


class _Station:
    def __init__(self, link: TcpLink, start: Start):
        self._link = link
        self._start = start
        settings = start.settings
        self._ranks = range(settings.first, settings.first + settings.count)
        self._began = time.monotonic()
        self._local: LocalRanks | None = None
        self._forwarders: list[threading.Thread] = []
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> None:
        """Start the ranks, and serve them until the team ends."""
        beats = _thread(self._beat)
        try:
            self._local = self._start_ranks()
            if self._local is None:
                while self._link.receive() is not None:  # rank 0 ends the team
                    pass
            else:
                self._serve(self._local)
        finally:
            self._ended.set()
            beats.join()

    def _start_ranks(self) -> LocalRanks | None:
        """None if that fails; rank 0 has been told."""
        try:
            return LocalRanks(self._ranks, _settings_here(self._start))
        except (ModelError, OSError, NotImplementedError) as error:
            self._link.send(encode(Refused(str(error))))
            return None

    def _serve(self, local: LocalRanks) -> None:
        for rank in self._ranks:
            self._forwarders.append(_thread(self._forward, local, rank))
        # Ranks that are behind must not keep us from noticing that rank 0 is lost.
        sender = _thread(self._send, local)
        local.watch(lambda rank, reason: self._on_lost(local, rank, reason))
        timeout = 0.0
        while (message := self._link.receive()) is not None:
            order = decode_order(message)
            if isinstance(order, Message):
                self._messages.put(order.content)
            elif isinstance(order, PrintStacks):
                local.peers[order.rank - self._ranks.start].print_stacks()
            else:
                timeout = CLOSE_SECONDS  # once rank 0 has ended, too
                local.expect_end()
                self._messages.put(None)
        self._messages.put(None)
        sender.join(timeout)
        local.finish(timeout)
        for thread in (sender, *self._forwarders):
            thread.join(_REPORT_SECONDS)
        local.close(0.0)

    def _send(self, local: LocalRanks) -> None:
        while (message := self._messages.get()) is not None:
            local.send(message)
        local.end()

    def _forward(self, local: LocalRanks, rank: int) -> None:
        while (report := local.receive(rank)) is not None:
            self._link.send(encode(Told(rank, report)))
        self._link.send(encode(Ended(rank)))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            finding = LastOperation("finding the model", -1, self._began)
            local = self._local
            if local is None:
                last = [finding] * len(self._ranks)
            else:
                last = [peer.last_operation() for peer in local.peers]
            self._link.send(encode(Beat.of(last)))

    def _on_lost(self, local: LocalRanks, rank: int, reason: str) -> None:
        local.kill()
        for thread in self._forwarders:
            thread.join(_REPORT_SECONDS)
        self._link.send(encode(Lost(rank, reason)))


def _settings_here(start: Start) -> TeamSettings:
    """The settings with this machine's folder of the model.

    Raises:
        ModelError: it is not here, or differs; or asyncllm does.
    """
    if start.version != __version__:
        raise ModelError(f"asyncllm is {__version__} here, and {start.version} with rank 0")
    config, there = start.settings.config, Path(start.settings.folder)
    folder = resolve_folder(config.model, config.revision, config.download_dir)
    if folder.name != there.name:  # the commit, of a model of the hub
        raise ModelError(f"the model is {folder.name} here, and {there.name} with rank 0")
    return msgspec.structs.replace(start.settings, folder=str(folder))


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="asyncllm-station", daemon=True)
    thread.start()
    return thread
