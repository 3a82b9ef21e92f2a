"""The memory of the simulated device: the content of each page, and the copies in flight."""

from __future__ import annotations

import zlib

import numpy as np

from asyncllm.wire.messages import TO_DEVICE, TO_HOST

#: The content of a page that is not full.
OPEN = -1


class BrokenPlan(Exception):
    """A plan that would corrupt KV."""


def fingerprint(before: int, tokens: bytes) -> int:
    """The content of a page with these int32 tokens, after a page of content ``before`` (0: none).

    It stands for all tokens of the sequence so far, as the page's KV depends on them.
    """
    return zlib.crc32(tokens, before)


class Tier:
    """Pages of one memory.

    Attributes:
        content: int64 [pages]; fingerprints, or OPEN.
        read, written: int32 [pages]; number of copies in flight that read, or write, each page.
    """

    def __init__(self, name: str, num_pages: int):
        self.name = name
        self.content = np.full(num_pages, OPEN, dtype=np.int64)
        self.read = np.zeros(num_pages, dtype=np.int32)
        self.written = np.zeros(num_pages, dtype=np.int32)


class SimPages:
    """Device and host pages.

    Copies are not ordered with steps or with each other. So until a copy is acknowledged, the page
    it writes must not be used, and the page it reads must not be written.

    Attributes:
        num_copies: pages being moved.
    """

    def __init__(self, num_pages: int, host_pages: int):
        self.device = Tier("device", num_pages)
        self.host = Tier("host", host_pages)
        self.num_copies = 0

    def begin(self, copies: np.ndarray) -> None:
        """Start copies, int32 [k, 3] of (direction, device page, host page).

        Raises:
            BrokenPlan: a copy is invalid, or conflicts with one in flight.
        """
        for copy in copies.tolist():
            direction, device, host = copy
            if direction not in (TO_HOST, TO_DEVICE):
                raise BrokenPlan(f"copy {copy} has no direction")
            if not (0 <= device < len(self.device.content) and 0 <= host < len(self.host.content)):
                raise BrokenPlan(f"copy {copy}: there is no such page")
            (source, read), (target, written) = self._ends(*copy)
            if source.written[read]:
                raise BrokenPlan(f"copy {copy}: the {source.name} page is still being filled")
            if target.read[written] or target.written[written]:
                raise BrokenPlan(f"copy {copy}: the {target.name} page is in use by another copy")
            if source.content[read] == OPEN:
                raise BrokenPlan(f"copy {copy}: the {source.name} page is not full")
            target.content[written] = source.content[read]
            self._count([copy], 1)

    def end(self, copies: np.ndarray) -> None:
        """These copies are acknowledged."""
        self._count(copies.tolist(), -1)

    def _count(self, copies: list[list[int]], change: int) -> None:
        self.num_copies += change * len(copies)
        for copy in copies:
            (source, read), (target, written) = self._ends(*copy)
            source.read[read] += change
            target.written[written] += change

    def _ends(self, direction: int, device: int, host: int) -> tuple[tuple[Tier, int], ...]:
        """Source and target of a copy."""
        ends = ((self.device, device), (self.host, host))
        return ends if direction == TO_HOST else ends[::-1]
