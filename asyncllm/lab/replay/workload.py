"""The requests of a trace, as sequences that the prefix cache treats like the recorded ones."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Self

import msgspec
import numpy as np

from asyncllm.engine.recording.trace_file import NEW_ROOT, Arrival, End, Pages, Trace, TraceError
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence
from asyncllm.lab.replay.figures import Record
from asyncllm.types import SamplingParams, SchedulingParams

#: ``LiveRequest.stop_next`` sets stop tokens.
_PARAMS = SamplingParams(ignore_eos=True)
_SCHEDULING = SchedulingParams()


class Request(msgspec.Struct):
    """A request of the trace.

    Attributes:
        node: the last page that it ever filled.
        filler: a token of its own, for pages that it never filled.
        group: a name for requests whose figures are wanted apart.
    """

    event: Arrival
    tenant: str
    node: int
    filler: int = 0
    group: str = ""

    @property
    def arrival(self) -> float:
        """When it arrived at the server; ``event.now`` is when it entered the queue."""
        return self.event.now if self.event.arrival is None else self.event.arrival


def plain_arrival(id: int, node: int, num_prompt: int, num_answer: int) -> Arrival:
    """A request that is in no trace; when it arrives is still to be said."""
    return Arrival(
        now=0.0,
        id=id,
        tenant="",
        node=node,
        new_pages=0,
        num_prompt=num_prompt,
        max_length=num_prompt + num_answer,
        priority=0,
        surely_full=True,
        arrival=None,
        deadline=None,
    )


class LiveRequest:
    """A request being replayed: its sequence, and the token of each position.

    Every token of a page is the page's number, so pages are equal if the recorded ones were.
    """

    __slots__ = ("_filler", "_nodes", "_page_size", "record", "request", "seq")

    def __init__(self, request: Request, salt: int, nodes: array[int], page_size: int):
        self.request = request
        self._nodes = nodes
        self._filler = request.filler
        self._page_size = page_size
        event = request.event
        self.seq = Sequence(
            event.id,
            self._prompt(event.num_prompt),
            _PARAMS,
            _SCHEDULING,
            max_length=event.max_length,
            eos_ids=(),
            seed=0,
            arrival=request.arrival,
        )
        self.seq.output.surely_full = event.surely_full
        self.seq.reads.logprobs = 0 if event.scored else -1
        self.seq.kv.ttl, self.seq.kv.shared = event.cache_ttl, event.shared
        self.seq.service.priority = event.priority
        self.seq.service.tenant = request.tenant
        self.seq.service.deadline = FOREVER if event.deadline is None else event.deadline
        self.seq.kv.salt = str(salt).encode()
        self.record = Record(
            event.id, request.group, request.arrival, self.seq.service.deadline, self.seq.num_prompt
        )

    @property
    def num_output(self) -> int:
        return self.seq.num_output

    @property
    def last_token(self) -> float:
        """The time of the latest token; -1.0 before the first."""
        return self.record.tokens[-1] if self.record.tokens else -1.0

    def admitted(self, now: float) -> None:
        """It enters the batch."""
        record = self.record
        record.num_admissions += 1
        if record.num_admissions == 1:
            record.started, record.num_cached = now, self.seq.num_cached

    def next_token(self, after: int = 0) -> int:
        """The token after the present ones and ``after`` more."""
        page = (len(self.seq.tokens) + after) // self._page_size
        return self._nodes[page] if page < len(self._nodes) else self._filler

    def stop_next(self, after: int = 0) -> None:
        """Make the next token a stop token, or the one after ``after`` more."""
        self.seq.output.stop_ids = frozenset((self.next_token(after),))
        self.seq.output.min_length = len(self.seq.tokens) + after

    def _prompt(self, length: int) -> array[int]:
        size = self._page_size
        tokens = np.full(length, self._filler, dtype=np.int32)
        full = np.repeat(np.array(self._nodes[: length // size + 1], dtype=np.int32), size)[:length]
        tokens[: len(full)] = full
        return array("i", tokens.tobytes())


class PageTree:
    """The tree of page numbers, stored as runs of consecutive numbers."""

    def __init__(self) -> None:
        self.count = 0
        self._firsts = array("q")
        self._parents = array("q")  # -1: a root, a salt

    def add(self, node: int, count: int) -> int:
        """Add ``count`` nodes after ``node``, or a new root for NEW_ROOT; returns the last node."""
        if node == NEW_ROOT:
            node = self._run(-1, 1)
        elif not 0 <= node < self.count:
            raise IndexError(f"no node {node}")  # it would make paths circular
        return self._run(node, count) if count else node

    def path(self, node: int) -> tuple[int, list[int]]:
        """The root of ``node``, and the pages from there to ``node``."""
        runs: list[range] = []
        while True:
            run = bisect_right(self._firsts, node) - 1
            parent = self._parents[run]
            if parent < 0:
                return node, [page for run_pages in reversed(runs) for page in run_pages]
            runs.append(range(self._firsts[run], node + 1))
            node = parent

    def _run(self, parent: int, count: int) -> int:
        self._firsts.append(self.count)
        self._parents.append(parent)
        self.count += count
        return self.count - 1


class Workload:
    """Requests by id, in order of arrival, and the tree of their pages.

    Attributes:
        ended: why the recording ended; None when the file was cut off.
        end: the time of the last event.
    """

    def __init__(self, page_size: int):
        self.requests: dict[int, Request] = {}
        self.pages = PageTree()
        self.ended: str | None = None
        self.end = 0.0
        self._page_size = page_size

    @classmethod
    def of_trace(cls, trace: Trace) -> Self:
        """All requests of a recorded trace, which is read to its end.

        Raises:
            TraceError: it is damaged.
        """
        workload = cls(trace.header.limits.page_size)
        try:
            workload._read(trace)
            workload.fill()
        except (LookupError, OverflowError) as error:
            raise TraceError(f"{trace.path} is damaged: {error!r}") from None
        return workload

    def add(self, event: Arrival, tenant: str, node: int, group: str = "") -> None:
        """A request whose prompt's full pages are the path to ``node``."""
        self.requests[event.id] = Request(event, tenant, node, group=group)
        self.end = event.now

    def fill(self) -> None:
        """Give each request a token that is no page's.

        Raises:
            OverflowError: there are too many pages.
        """
        if self.pages.count + len(self.requests) >= 2**31:
            raise OverflowError("too many pages")
        for filler, request in enumerate(self.requests.values(), self.pages.count):
            request.filler = filler

    def enter(self, id: int) -> LiveRequest:
        """A fresh sequence for a request."""
        request = self.requests[id]
        salt, pages = self.pages.path(request.node)
        return LiveRequest(request, salt, array("i", pages), self._page_size)

    def _read(self, trace: Trace) -> None:
        tenants: list[str] = []
        for event in trace.events():
            if isinstance(event, Arrival):
                if isinstance(event.tenant, str):
                    tenants.append(event.tenant)
                name = event.tenant if isinstance(event.tenant, str) else tenants[event.tenant]
                self.add(event, name, self.pages.add(event.node, event.new_pages))
            elif isinstance(event, Pages):
                self.requests[event.id].node = self.pages.add(event.node, event.new_pages)
            elif isinstance(event, End):
                self.ended = event.reason
                break
            if not isinstance(event, Pages):
                self.end = event.now
