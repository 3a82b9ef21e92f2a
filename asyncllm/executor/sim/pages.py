"""The memory of the simulated device: the content of each page and state, and copies in flight."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from asyncllm.wire.messages import STATE_TO_HOST, TO_DEVICE, TO_HOST

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


class SimStates:
    """Recurrent states by state slot: which tokens each has taken in.

    Args:
        num_states: state slots, numbered from 1.
        num_slots: places for sequences.
        size: host pages that a copy of a state takes.
        host: the pages there.
    """

    def __init__(self, num_states: int, num_slots: int, size: int, host: Tier):
        self._num_states = num_states
        self._size = size
        self._host = host
        #: By the first of its host pages: the state whose copy began there last.
        self._saved: dict[int, tuple[int, int]] = {}
        #: State slots that copies in flight read, and write.
        self._read: set[int] = set()
        self._written: set[int] = set()
        #: (how many tokens, their fingerprint) by state slot, and by sequence.
        self._states: dict[int, tuple[int, int]] = {}
        self._due: list[tuple[int, int]] = [(0, 0)] * num_slots

    def copy(self, copies: np.ndarray) -> None:
        """Copy states, in order; int [k, 2] of (source, destination)."""
        for source, target in copies.tolist():
            if source not in self._states or not 1 <= target <= self._num_states:
                raise BrokenPlan(f"there is no state in slot {source}, or no slot {target}")
            if source in self._written or target in self._read | self._written:
                raise BrokenPlan(f"a copy is at state slot {source} or {target}")
            self._states[target] = self._states[source]

    def begin_copies(self, copies: np.ndarray) -> None:
        """Start copies to and from the host: int [k, 3] of (direction, state slot, host page)."""
        for way, slot, pages in self._grouped(copies):
            if not 1 <= slot <= self._num_states or len(pages) != self._size:
                raise BrokenPlan(f"state slot {slot}, or its host pages {pages}, do not exist")
            if slot in self._read | self._written:
                raise BrokenPlan(f"a copy is at state slot {slot} already")
            busy = self._host.written[pages].any()
            if way == STATE_TO_HOST:
                if slot not in self._states or busy or self._host.read[pages].any():
                    raise BrokenPlan(f"state slot {slot} cannot be copied to host pages {pages}")
                self._read.add(slot)
                self._saved[pages[0]] = self._states[slot]
                self._host.content[pages] = self._parts(pages[0])
            else:
                if busy or self._host.content[pages].tolist() != self._parts(pages[0]):
                    raise BrokenPlan(f"host pages {pages} do not have a state")
                self._written.add(slot)
                self._states[slot] = self._saved[pages[0]]
            self._count(way, pages, 1)

    def end_copies(self, copies: np.ndarray) -> None:
        """These are acknowledged."""
        for way, slot, pages in self._grouped(copies):
            self._read.discard(slot)
            self._written.discard(slot)
            self._count(way, pages, -1)

    def _count(self, way: int, pages: list[int], change: int) -> None:
        """Pages of the host that copies begin or end to use."""
        used = self._host.written if way == STATE_TO_HOST else self._host.read
        used[pages] += change

    def _parts(self, first: int) -> list[int]:
        """What host pages hold: the parts of the state that was saved to these, from the first."""
        _, content = self._saved.get(first, (0, OPEN))
        return [fingerprint(content & 0xFFFFFFFF, bytes([i % 256])) for i in range(self._size)]

    @staticmethod
    def _grouped(copies: np.ndarray) -> Iterator[tuple[int, int, list[int]]]:
        """(direction, state slot, its host pages) of each state."""
        for (way, slot), entries in groupby(copies.tolist(), lambda entry: (entry[0], entry[1])):
            yield way, slot, [host for _, _, host in entries]

    def begin(self, slot: int, tokens: bytes) -> None:
        """A sequence begins after these int32 tokens."""
        self._due[slot] = (len(tokens) // 4, fingerprint(0, tokens))

    def check(self, states: np.ndarray, slots: np.ndarray) -> None:
        """Refuse rows of sequences whose states have not taken in just the tokens before."""
        listed = states.tolist()
        if len(listed) != len(slots) or len(set(listed)) < len(listed):
            raise BrokenPlan(f"state slots {listed} are not one for each of {len(slots)} rows")
        for state, slot in zip(listed, slots.tolist(), strict=True):
            start, content = self._due[slot]
            if state in self._read | self._written:
                raise BrokenPlan(f"slot {slot} has state slot {state} while a copy is at it")
            if not 1 <= state <= self._num_states:
                raise BrokenPlan(f"slot {slot} has state slot {state}, which does not exist")
            found = self._states.get(state, (0, 0)) if start else (0, 0)
            if found != (start, content):
                raise BrokenPlan(
                    f"slot {slot} goes on at {start} from the state in slot {state}, which is that "
                    f"of {found[0]} tokens" + (", but of others" if found[0] == start else "")
                )

    def take_in(self, state: int, slot: int, tokens: bytes) -> None:
        """A row has computed these int32 tokens."""
        start, content = self._due[slot]
        after = start + len(tokens) // 4, fingerprint(content, tokens)
        self._due[slot] = self._states[state] = after
