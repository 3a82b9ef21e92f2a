"""Whether a child process makes progress, as its parent sees it from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Between two checks of a child. They are counted, not seconds: a parent that was stopped together
#: with its children must not blame them.
CHECK_SECONDS: Final = 1.0
#: A child is lost that is stopped, as by SIGSTOP, in so many checks in a row.
STOPPED_CHECKS: Final = 3
#: And one that sleeps without using a processor in so many, although it owes its parent something.
STILL_CHECKS: Final = 15


class Progress:
    """One child, from its start to its end."""

    def __init__(self, pid: int):
        self._folder = Path(f"/proc/{pid}")
        self._stopped = self._still = self._waited = 0
        self._used = ""

    def check(self, patience: int | None) -> str | None:
        """Check once.

        Args:
            patience: in how many checks the child is to do what it owes; None if it owes nothing.

        Returns:
            Why the child is lost, for the log; None while it is not.
        """
        try:
            stat = (self._folder / "stat").read_text(encoding="utf-8")
        except OSError:  # it has ended, as a signal will say
            return None
        state, *fields = stat.rpartition(")")[2].split()
        # A debugger's stop is another state, and does not count.
        self._stopped = self._stopped + 1 if state == "T" else 0
        if self._stopped >= STOPPED_CHECKS:
            return "is stopped"
        if patience is None:
            self._waited = self._still = 0
            return None
        used = f"{fields[10]} {fields[11]} {self._nanoseconds()}"
        self._still = self._still + 1 if state == "S" and used == self._used else 0
        self._used = used
        self._waited += 1
        if self._still >= STILL_CHECKS:
            return f"hangs: it has done nothing for {STILL_CHECKS * CHECK_SECONDS:.0f} s"
        if self._waited >= patience:
            return f"hangs: it is not done after {patience * CHECK_SECONDS:.0f} s"
        return None

    def _nanoseconds(self) -> str:
        """What the main thread has run, finer than the ticks of all threads; empty if unknown."""
        try:
            return (self._folder / "schedstat").read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError):
            return ""
