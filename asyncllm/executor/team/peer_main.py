"""How a peer's main begins; ``asyncllm/executor/team/process.py`` is its parent's side."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import Final, NamedTuple, TypeVar

import msgspec

from asyncllm.executor.team.status import PeerStatus
from asyncllm.system.child_process import die_at_end_of, die_with
from asyncllm.system.json_log import JsonFormatter

T = TypeVar("T")

#: The signal that makes a peer write its stacks to stderr.
PRINT_STACKS: Final = signal.SIGUSR1


class PeerArguments(NamedTuple):
    """The peer's command line: its parent's process id, its rank, and descriptors.

    Attributes:
        logs_json: 1 for a log in JSON, as its parent's; else 0.
    """

    parent: int
    rank: int
    logs_json: int
    settings: int
    status: int
    lifeline: int


def enter_team(settings_type: type[T], name: str = "rank") -> tuple[T, PeerStatus]:
    """To be called first in a peer's main: its settings, and where it says what it does.

    From then on the process dies with its parent and takes no notice of Ctrl-C or SIGTERM, which
    its parent gets as well and drains. Its log lines name its rank, by the word ``name``.

    Raises:
        msgspec.ValidationError: the settings are of another type.
    """
    arguments = PeerArguments(*map(int, sys.argv[1:]))
    die_with(arguments.parent)
    die_at_end_of(arguments.lifeline)
    for fd in (arguments.lifeline, arguments.status):
        os.set_inheritable(fd, False)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(PRINT_STACKS)
    handler, rank = logging.StreamHandler(), arguments.rank
    if arguments.logs_json:
        handler.setFormatter(JsonFormatter(lambda: {name: rank}))
        logging.captureWarnings(True)
    else:
        text = f"%(asctime)s %(levelname)s [{name} {rank}] %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text))
    logging.basicConfig(handlers=[handler])
    with open(arguments.settings, "rb") as file:
        settings = msgspec.msgpack.decode(file.read(), type=settings_type)
    return settings, PeerStatus(arguments.status)
