"""Listening sockets."""

from __future__ import annotations

import errno
import logging
import socket
from typing import Final

log = logging.getLogger(__name__)

BACKLOG: Final = 2048

#: Addresses that a host name may resolve to although this machine does not have them.
_NOT_HERE: Final = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of ``host``, all with the same port; "" is all interfaces.

    Raises:
        OSError, OverflowError: no address of the host can be listened on, or one is taken.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if sockets and port == 0:  # the kernel has picked one by now
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            try:
                listening = socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                absent = error
                continue
            listening.setblocking(False)
            sockets.append(listening)
        if not sockets:
            raise absent or OSError(f"{host!r} has no address")
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def listen(host: str, port: int) -> list[socket.socket] | None:
    """Like ``bind``, but None where it raises, after a line in the log."""
    try:
        return bind(host, port)
    except (OSError, OverflowError) as error:
        log.error("cannot listen on %s: %s", url_of(host, port), error)
        return None


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
