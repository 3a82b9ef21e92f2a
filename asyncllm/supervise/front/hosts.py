"""Names by which clients may call a server without keys: those that no stranger can own."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asyncllm.config.server_config import ServerConfig

#: A Host header: a name, or an IPv6 address in brackets, and perhaps a port.
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+(?:%[^\]\s]+)?\]|[a-z0-9._-]+)(?::[0-9]*)?", re.I)
#: The last part of an IPv4 address; browsers take no name that ends like this for anything else.
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
#: Endings of names that are resolved on this machine or in the local network alone.
_LOCAL: Final = frozenset(("localhost", "local", "internal"))


class Hosts:
    def __init__(self, names: Iterable[str]):
        """
        Args:
            names: besides local ones and addresses; ".example.org" stands for that and all names
                below it, "*" for any.
        """
        self._known = frozenset(
            name if name == "*" else name.lower().removeprefix("*").removesuffix(".")
            for name in (*names, socket.gethostname())
        )

    def __contains__(self, host: str) -> bool:
        """Whether a Host header may say this; it may be empty."""
        if not host or "*" in self._known:
            return True
        if not (name := name_of(host)):
            return False
        labels = name.split(".")
        # Nobody can own a name without a dot; and addresses are not looked up.
        is_local = name.startswith("[") or len(labels) == 1 or labels[-1] in _LOCAL
        if is_local or _NUMBER.fullmatch(labels[-1]) or name in self._known:
            return True
        return any(f".{'.'.join(labels[i:])}" in self._known for i in range(len(labels)))


def hosts_of(config: ServerConfig) -> Hosts | None:
    """None if clients need a key, and may call the server anything."""
    if config.api_key or config.api_key_file is not None:
        return None
    return Hosts((*config.allowed_hosts, config.host))


def name_of(host: str) -> str:
    """The name that a Host header has; empty if it is malformed."""
    found = _HOST.fullmatch(host)
    return found[1].lower().removesuffix(".") if found else ""
