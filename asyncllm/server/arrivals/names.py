"""Names that say which of several replicas has what they name."""

from __future__ import annotations

import re
import uuid
from typing import Final, NamedTuple

from aiohttp import web

from asyncllm.supervise.front.request import MOST_REPLICAS

#: Of one process; browsers count exactly up to 2 ** 53, which is enough for 35,000 restarts.
MOST_REQUESTS: Final = 10**9

_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{30}([0-9a-f]{2})")


class Numbers(NamedTuple):
    """Makes names of requests that no other replica gives, and no process before or after.

    Attributes:
        replica: which of several this is; None if there is one server.
        restarts: how many processes have died here before.
        replicas: how many have the same front; 0 without one.
    """

    replica: int | None = None
    restarts: int = 0
    replicas: int = 0

    def shown(self, number: int) -> int:
        """As clients see it; ``number`` is the engine's, which begins at 1 in each process."""
        number += self.restarts * MOST_REQUESTS
        return number if self.replica is None else number * MOST_REPLICAS + self.replica

    def here(self, shown: int) -> int | None:
        """The engine's number; None if it is another process's."""
        if self.replica is not None:
            shown, replica = divmod(shown, MOST_REPLICAS)
            if replica != self.replica:
                return None
        restarts, number = divmod(shown, MOST_REQUESTS)
        return number if restarts == self.restarts else None

    def new_id(self) -> str:
        """32 hexadecimal digits, of which the last two are the replica, if there are several."""
        id = uuid.uuid4().hex
        return id if self.replica is None else f"{id[:-2]}{self.replica:02x}"


#: Of the process that serves.
NUMBERS: Final = web.AppKey("asyncllm_numbers", Numbers)


def home_of_number(shown: str) -> int | None:
    """The replica of a number as clients see it; None if it is no number."""
    return int(shown) % MOST_REPLICAS if is_number(shown) else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def home_of_id(id: str) -> int | None:
    """The replica of a response; None if it is the id of something else."""
    found = _RESPONSE.fullmatch(id)
    return None if found is None else int(found[1], 16)
