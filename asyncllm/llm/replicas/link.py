"""Messages between this program and its replicas, over a socket that only the two have."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.wire.socket_channel import SocketLink

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable


class Link:
    """One end, of a program's event loop or a replica's. Both ends are this very package, started
    by this very program, so messages are pickled."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        on_message: Callable[..., None],
        on_end: Callable[[], None],
    ):
        """
        Args:
            end: the link owns it.
            on_message: called with the parts of each message; must not raise.
            on_end: called once, when the other end is gone.
        """
        self._socket = SocketLink(loop, end, lambda data: on_message(*pickle.loads(data)), on_end)

    def send(self, *message: Any) -> None:
        """Nothing happens if the other end is gone."""
        self._socket.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def finish(self) -> None:
        """Send nothing more: the other end sees that after what was sent before."""
        self._socket.finish()

    def close(self) -> None:
        """Send and receive nothing more. May be called again."""
        self._socket.close()


def pack(*parts: Any) -> bytes:
    """What a caller gave, for ``unpack`` at the other end.

    Raises:
        BadRequest: it has an object that cannot be sent.
    """
    try:
        return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise BadRequest(f"the request cannot be sent to a replica: {error}") from error


def unpack(data: bytes) -> tuple[Any, ...]:
    """
    Raises:
        BadRequest: it has an object of a class that only the caller's program knows.
    """
    try:
        parts: tuple[Any, ...] = pickle.loads(data)
    except Exception as error:
        raise BadRequest(f"the request cannot be read in a replica: {error}") from error
    return parts


def pack_error(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """An exception whose constructor takes other arguments than it keeps."""
    return type(error), error.args, {k: v for k, v in vars(error).items() if k[:2] != "__"}


def unpack_error(packed: tuple[type[Exception], tuple[Any, ...], dict[str, Any]]) -> Exception:
    kind, args, state = packed
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error
