"""How a server is told to end, and says why it did: both processes agree on this."""

from __future__ import annotations

import os
import signal
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGINT)
#: What the parent process handles.
HANDLED: Final = (*STOPS, signal.SIGHUP, signal.SIGCHLD)
#: How the parent passes them on. Not as they came: a signal to the whole process group has reached
#: the server already, and would be counted twice.
FORWARDED_STOP: Final = signal.SIGUSR2
#: Signals this close together count as one: some wrappers signal a process and its group.
SAME_SECONDS: Final = 0.2
#: Time for the serving process to end by itself after draining.
GRACE_SECONDS: Final = 5.0
#: The exit code of a server whose engine died or stalled: a supervisor should start another one.
DEAD: Final = 70  # EX_SOFTWARE of sysexits.h


def exit_code(code: int) -> int:
    """As a shell says it: 128 and the number of the signal."""
    return code if code >= 0 else 128 - code


def cause_of(code: int, *, was_killed: bool = False) -> str:
    """How a process has ended, for the log.

    Args:
        code: a signal's number, negated, or an exit status.
        was_killed: by its parent.
    """
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" and not was_killed else ""
        return f"by {name}{hint}"
    return f"with status {code}" + (", its engine dead or stalled" if code == DEAD else "")


class Terminal:
    """The controlling terminal of this process, if it had one when this object was made.

    SIGHUP has two meanings: "read your configuration again", and "your terminal is gone".
    """

    def __init__(self) -> None:
        # Under nohup, the terminal may go.
        self._matters = _is_there() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def hung_up(self) -> bool:
        """Whether it was closed, which ends the program that was started in it."""
        return self._matters and not _is_there()


def _is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
