"""The connections of a port, also when there are nearly as many as the process may have files.

Every connection is a file, and a server needs some more: to answer probes, to refuse clients, to
pass requests on to other processes. So connections leave some descriptors free. When there are too
many, idle ones are closed, those that have been idle for longest first. If none is, further clients
are told to come back later, and probes still get their answers.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final, NamedTuple, Protocol, Self

from asyncllm.errors import Crowded

log = logging.getLogger(__name__)

#: A lower limit is worth a warning.
MANY: Final = 1024
#: So many descriptors are kept free of connections, or a quarter of them if there are few.
SPARE: Final = 64
#: A connection may be closed that has been idle for so long; and when nothing else helps.
IDLE_SECONDS: Final = 1.0
LEAST_IDLE_SECONDS: Final = 0.1
#: The log says at most this often that there is a crowd.
LOG_SECONDS: Final = 60.0
#: Paths of probes.
PROBES: Final = frozenset(("/health", "/ready", "/ping", "/load", "/metrics"))
#: Errors of calls that need a descriptor, or memory for it: later there may be one.
EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class FileLimit(NamedTuple):
    """Of this process, as it is now.

    A new file gets the lowest number that is free. So if that is ``connections`` or more, no lower
    one is.

    Attributes:
        files: how many may be open.
        connections: descriptors below this are for connections.
        probes: those between are for connections that end soon; above, for anything but these.
    """

    files: int
    connections: int
    probes: int

    @classmethod
    def now(cls) -> Self:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 2**30 if soft == resource.RLIM_INFINITY else soft
        spare = min(SPARE, files // 4)
        return cls(files, files - spare, files - spare // 2)


def allow_all_files() -> None:
    """Raise the limit as far as the system lets this process; its children inherit that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # not on every system
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = FileLimit.now()
    log.log(
        logging.INFO if limit.files >= MANY else logging.WARNING,
        "at most %d open files (ulimit -n), of which up to %d may be connections",
        limit.files,
        limit.connections,
    )


class Use(Enum):
    """What a connection may be used for."""

    FREELY = 0
    ONCE = 1  # it ends with its first answer
    PROBING = 2  # the same, and only a probe is served


class HasIdle(Protocol):
    def leave(self) -> bool:
        """Close this connection, which is idle; False if a request is just coming."""


class Crowd:
    """Attributes:
    num_open: connections, idle ones among them.
    counts: connections that were closed because they were idle ("closed"), and those of which
        requests were refused ("refused").
    limit: of this process's files.
    is_leaving: the port closes soon, so each connection ends with its next answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.num_open = 0
        self.counts: Counter[str] = Counter(closed=0, refused=0)
        self.limit = FileLimit.now()
        self.is_leaving = False
        self._clock = clock
        self._idle: dict[HasIdle, float] = {}  # since when, the longest first
        self._log_at = clock()

    def rests(self, connection: HasIdle) -> None:
        """It is idle from now on."""
        self._idle.pop(connection, None)
        self._idle[connection] = self._clock()

    def works(self, connection: HasIdle) -> None:
        """It is not idle."""
        self._idle.pop(connection, None)

    def use_of(self, file: int) -> Use:
        """What a new connection may be used for; makes room for it and for others.

        Args:
            file: its descriptor.
        """
        limit = self.limit
        spare = limit.files - limit.connections
        if file < limit.connections - spare // 4:
            return Use.FREELY
        # Some more than one: those that come next get their numbers, and cause no crowd.
        num_closed = self._close_idle(spare // 4, IDLE_SECONDS)
        if file < limit.connections:
            return Use.FREELY
        return Use.ONCE if num_closed else Use.PROBING

    def is_full(self, file: int) -> bool:
        """Whether no connection should be accepted now; then, that may change soon.

        Args:
            file: any that is open.
        """
        try:
            lowest = os.dup(file)
        except OSError:
            lowest = self.limit.files
        else:
            os.close(lowest)
        if lowest < self.limit.probes:
            return False
        self._close_idle(self.limit.files - self.limit.connections, LEAST_IDLE_SECONDS)
        return True

    def _close_idle(self, most: int, seconds: float) -> int:
        """Close so many that have been idle for so long; returns how many there were."""
        until = self._clock() - seconds
        left: list[HasIdle] = []
        for connection, since in self._idle.items():
            if len(left) == most or since > until:
                break
            if connection.leave():
                left.append(connection)
        for connection in left:
            self.works(connection)
        if left:
            self.counts["closed"] += len(left)
            self._tell()
        return len(left)

    def _tell(self) -> None:
        if (now := self._clock()) >= self._log_at:
            self._log_at = now + LOG_SECONDS
            log.warning(
                "%d connections are open, with a limit of %d open files (ulimit -n): idle ones are "
                "closed, and where there are none, further requests get 503",
                self.num_open,
                self.limit.files,
            )

    def refusal(self) -> Crowded:
        """What a request is told that is no probe, on a connection for probes."""
        self.counts["refused"] += 1
        self._tell()
        return Crowded(
            "the server has as many connections as its limit of open files allows "
            f"(ulimit -n: {self.limit.files}); try again later"
        )
