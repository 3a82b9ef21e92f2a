"""The real scheduler, fed with the requests of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import FOREVER
from asyncllm.engine.scheduling.speculation.choice import Speculation
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.lab.replay.acceptance import Acceptance, ChanceDraft, count_right
from asyncllm.lab.replay.figures import Figures
from asyncllm.lab.replay.workload import LiveRequest, Workload
from asyncllm.wire.messages import BAD_TOKEN, NO_TOKEN, StepResult, pack, unpack


class StepRows(NamedTuple):
    """What the rows of one step compute.

    Attributes:
        starts, lengths: int64 [n]; tokens already cached, and new ones, of each row.
        decodes: bool [n]; False for prompt chunks.
        num_samples: rows that sample.
        decode_steps: tokens that each decode row yields.
        drafts: the drafted tokens of rows that have some.
    """

    starts: np.ndarray
    lengths: np.ndarray
    decodes: np.ndarray
    num_samples: int
    decode_steps: int
    drafts: dict[int, list[int]] = {}  # noqa: RUF012

    @property
    def shape(self) -> StepShape:
        """Of the first of its decode steps."""
        starts, lengths = self.starts[~self.decodes], self.lengths[~self.decodes]
        attention = (lengths * (starts + lengths / 2)).sum()
        kv_tokens = (self.starts[self.decodes] + 1).sum()
        return StepShape(int(self.lengths.sum()), int(kv_tokens), float(attention))


class _Step(msgspec.Struct, frozen=True):
    """A step in flight, and the request of each of its rows."""

    number: int
    owners: list[LiveRequest]
    rows: StepRows


class Run:
    """Passes events to the scheduler, and tracks slots and rows as a device would.

    ``live`` are the requests that have not ended. ``acceptance`` is of the drafts of requests.
    """

    def __init__(
        self,
        workload: Workload,
        limits: EngineLimits,
        policy: Policy,
        speculation: Speculation | None = None,
        acceptance: Mapping[int, Acceptance] = {},
    ):
        self.figures = Figures()
        self.scheduler = Scheduler.create(limits, policy, speculation)
        self.live: dict[int, LiveRequest] = {}
        self._workload = workload
        self._acceptance = acceptance
        self._slots: dict[int, LiveRequest] = {}
        self._known = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._steps: deque[_Step] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def next_rows(self) -> list[LiveRequest]:
        """The requests of the rows of the oldest step in flight."""
        return self._steps[0].owners

    def stop(self, row: int) -> None:
        """Make this row's token of the oldest step a stop token."""
        after, row = divmod(row, len(self.next_rows))
        self.next_rows[row].stop_next(after)

    @property
    def next_right(self) -> tuple[int, ...]:
        """How many drafted tokens of each of these rows that has some will be right."""
        owners, drafts = self.next_rows, self._steps[0].rows.drafts
        return tuple(count_right(len(owners[row].seq.tokens), drafts[row]) for row in drafts)

    def next_counts(self, right: tuple[int, ...]) -> list[int]:
        """Tokens that each of these rows yields, given how many drafted ones are right."""
        step = self._steps[0]
        counts = [step.rows.decode_steps] * len(step.owners)
        for row, num_right in zip(step.rows.drafts, right, strict=True):
            counts[row] = 1 + num_right
        return counts

    def add(self, id: int, now: float) -> None:
        self._add(self._enter(id), now)

    def _enter(self, id: int) -> LiveRequest:
        live, acceptance = self._workload.enter(id), self._acceptance.get(id)
        if acceptance is not None:
            live.seq.drafting = Drafting([ChanceDraft(id, acceptance)], by_chance=True)
        return live

    def offer(self, id: int, now: float) -> float | None:
        """Add a request whose deadline can be met: returns the deadline, None if it is refused."""
        live = self._enter(id)
        deadline = live.record.deadline
        if deadline < FOREVER and now + self.scheduler.backlog.least_seconds(live.seq) > deadline:
            live.record.outcome = "refused"
            self.figures.arrived(live.record, now)
            return None
        self._add(live, now)
        return deadline

    def finish(self, id: int, now: float) -> LiveRequest | None:
        """The request; None if it has ended already."""
        live = self.live.pop(id, None)
        if live is not None:
            live.record.outcome = "dropped"
            self.scheduler.finish(live.seq, now)
        return live

    def plan(self, number: int, now: float) -> Planned | None:
        planned = self.scheduler.plan(number, now)
        self.figures.num_preemptions = self.scheduler.departures.num_preemptions
        if planned is None:
            return None
        self.figures.num_steps += 1
        message = planned.message
        for admit, seq in zip(message.admits, planned.admitted, strict=True):
            live = self._slots[admit.slot] = self.live[seq.id]
            self._known[admit.slot] = len(seq.tokens)
            live.admitted(now)
        slots, starts, lengths = unpack(message.rows, 3).astype(np.int64).T
        owners = [self._slots[slot] for slot in slots.tolist()]
        known = self._known[slots]
        decodes = starts >= known
        for row in np.flatnonzero(~decodes).tolist():
            owners[row].record.num_prefilled += int(lengths[row])
        drafts = _by_row(unpack(message.drafts).tolist(), decodes, lengths)
        num_samples = int((starts + lengths >= known).sum()) + len(unpack(message.drafts))
        rows = StepRows(starts, lengths, decodes, num_samples, message.decode_steps, drafts)
        self._steps.append(_Step(number, owners, rows))
        return planned

    @property
    def planned_rows(self) -> StepRows:
        """Of the step planned last."""
        return self._steps[-1].rows

    def apply(
        self,
        now: float,
        seconds: float,
        *,
        bad: Iterable[int] = (),
        unmet: Iterable[int] = (),
        failed: bool = False,
        copied: tuple[tuple[int, float], ...] = (),
        right: tuple[int, ...] = (),
    ) -> list[LiveRequest]:
        """Apply the result of the oldest step in flight; returns the requests that it ends.

        ``stop`` sets the stop tokens. Arguments as in ``trace_file.Result``.
        """
        counts = self.next_counts(right or (0,) * len(self._steps[0].rows.drafts))
        step = self._steps.popleft()
        owners = step.owners
        for row in np.flatnonzero(step.rows.decodes).tolist():
            owners[row].record.num_rows += 1
        for (row, draft), num_right in zip(step.rows.drafts.items(), right, strict=not failed):
            owners[row].record.verified(len(draft), num_right)
        tokens = [
            live.next_token(after) if after < count else NO_TOKEN
            for after in range(max(counts, default=0))
            for live, count in zip(owners, counts, strict=True)
        ]
        for row in bad:
            tokens[row] = BAD_TOKEN
        error = "it failed when it was recorded" if failed else None
        failures = tuple((row, "so it was recorded") for row in unmet)
        message = StepResult(
            step.number, pack(tokens), (), error, 0.0, 0.0, copied, seconds, failures=failures
        )
        emitted, lost, _ = self.scheduler.apply(message, now)
        ended = [self.live.pop(seq.id) for seq in lost]
        for live in ended:
            live.record.outcome = "dropped"
        for seq, row, token, finish in emitted:
            live = owners[row % len(owners)]
            if token >= 0:
                live.record.tokens.append(now)
            if finish is not None or token == BAD_TOKEN:
                live.record.outcome = "finished" if finish is not None else "dropped"
                ended.append(self.live.pop(seq.id))
        self.figures.ended = now
        return ended

    def _add(self, live: LiveRequest, now: float) -> None:
        self.live[live.seq.id] = live
        self.figures.arrived(live.record, now)
        self.scheduler.add(live.seq, now)


def _by_row(drafted: list[int], decodes: np.ndarray, lengths: np.ndarray) -> dict[int, list[int]]:
    """The drafted tokens of a plan, by the rows that verify them."""
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero(decodes & (lengths > 1)).tolist():
        count = int(lengths[row]) - 1
        found[row], drafted = drafted[:count], drafted[count:]
    return found
