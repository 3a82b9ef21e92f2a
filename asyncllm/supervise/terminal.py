"""SIGHUP has two meanings: "read your configuration again", and "your terminal is gone"."""

from __future__ import annotations

import os
import signal


class Terminal:
    """The controlling terminal of this process, if it had one when this object was made."""

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
