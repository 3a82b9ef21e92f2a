"""How a server is told to end, and says why it did: both processes agree on this."""

from __future__ import annotations

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
