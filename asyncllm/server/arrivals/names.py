"""Names that say which of several replicas has what they name."""

from __future__ import annotations

import re
import uuid
from typing import Final

from asyncllm.front.request import MOST_REPLICAS

_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{30}([0-9a-f]{2})")


def number_at(replica: int | None, number: int) -> int:
    """As clients see the number of something that one of several replicas has."""
    return number if replica is None else number * MOST_REPLICAS + replica


def number_here(replica: int | None, shown: int) -> int:
    """What ``number_at`` has made a number of."""
    return shown if replica is None else shown // MOST_REPLICAS


def home_of_number(shown: str) -> int | None:
    """The replica of a number that ``number_at`` has made; None if it is no number."""
    return int(shown) % MOST_REPLICAS if is_number(shown) else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def new_id(replica: int | None) -> str:
    """32 hexadecimal digits, the last two of which are those of the replica, if there is one."""
    id = uuid.uuid4().hex
    return id if replica is None else f"{id[:-2]}{replica:02x}"


def home_of_id(id: str) -> int | None:
    """The replica of a response; None if it is the id of something else."""
    found = _RESPONSE.fullmatch(id)
    return None if found is None else int(found[1], 16)
