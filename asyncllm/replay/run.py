"""The real scheduler, fed with the requests of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import Policy
from asyncllm.engine.scheduling.outcome import Planned
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.step_time import StepShape
from asyncllm.replay.figures import Figures
from asyncllm.replay.workload import LiveRequest, Workload
from asyncllm.wire.messages import BAD_TOKEN, StepPlan, StepResult, pack, unpack


class Run:
    """Passes events to the scheduler, and tracks slots and rows as a device would.

    ``live`` are the requests that have not ended.
    """

    def __init__(self, workload: Workload, limits: EngineLimits, policy: Policy):
        self.figures = Figures()
        self.scheduler = Scheduler.create(limits, policy)
        self.live: dict[int, LiveRequest] = {}
        self._workload = workload
        self._slots: dict[int, LiveRequest] = {}
        self._known = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._steps: deque[tuple[int, list[LiveRequest], int]] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def next_rows(self) -> list[LiveRequest]:
        """The requests of the rows of the oldest step in flight."""
        return self._steps[0][1]

    def stop(self, row: int) -> None:
        """Make this row's token of the oldest step a stop token."""
        after, row = divmod(row, len(self.next_rows))
        self.next_rows[row].stop_next(after)

    @property
    def next_decode_steps(self) -> int:
        """Tokens that each of these rows yields."""
        return self._steps[0][2]

    def add(self, id: int, now: float) -> None:
        self.figures.arrived(now)
        live = self.live[id] = self._workload.enter(id)
        self.scheduler.add(live.seq, now)

    def finish(self, id: int, now: float) -> LiveRequest | None:
        """The request; None if it has ended already."""
        live = self.live.pop(id, None)
        if live is not None:
            self.scheduler.finish(live.seq, now)
        return live

    def plan(self, number: int, now: float) -> Planned | None:
        planned = self.scheduler.plan(number, now)
        self.figures.num_preemptions = self.scheduler.num_preemptions
        if planned is None:
            return None
        self.figures.num_steps += 1
        message = planned.message
        for admit, seq in zip(message.admits, planned.admitted, strict=True):
            live = self._slots[admit.slot] = self.live[seq.id]
            self._known[admit.slot] = len(seq.tokens)
            self.figures.admitted(live, now)
        slots = unpack(message.rows, 3)[:, 0].tolist()
        self._steps.append((number, [self._slots[slot] for slot in slots], message.decode_steps))
        return planned

    def shape(self, plan: StepPlan) -> StepShape:
        """The shape of the step planned last."""
        slots, starts, q_lens = unpack(plan.rows, 3).astype(np.int64).T
        decodes = starts >= self._known[slots]
        starts_, lens = starts[~decodes], q_lens[~decodes]
        attention = (lens * (starts_ + lens / 2)).sum()
        kv_tokens = (starts[decodes] + 1).sum()
        return StepShape(int(q_lens.sum()), int(kv_tokens), float(attention))

    def rows(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray, int]:
        """Starts and lengths of the rows of the step planned last, and how many of them sample."""
        slots, starts, q_lens = unpack(plan.rows, 3).astype(np.int64).T
        return starts, q_lens, int((starts + q_lens >= self._known[slots]).sum())

    def apply(
        self,
        now: float,
        seconds: float,
        *,
        bad: Iterable[int] = (),
        unmet: Iterable[int] = (),
        failed: bool = False,
        copied: tuple[tuple[int, float], ...] = (),
    ) -> list[LiveRequest]:
        """Apply the result of the oldest step in flight; returns the requests that it ends.

        ``stop`` sets the stop tokens. Arguments as in ``trace_file.Result``.
        """
        number, rows, decode_steps = self._steps.popleft()
        tokens = [live.next_token(after) for after in range(decode_steps) for live in rows]
        for row in bad:
            tokens[row] = BAD_TOKEN
        error = "it failed when it was recorded" if failed else None
        failures = tuple((row, "so it was recorded") for row in unmet)
        message = StepResult(
            number, pack(tokens), (), error, 0.0, 0.0, copied, seconds, failures=failures
        )
        emitted, lost, _ = self.scheduler.apply(message, now)
        ended = [self.live.pop(seq.id) for seq in lost]
        for seq, row, token, finish in emitted:
            live = rows[row % len(rows)]
            if token >= 0:
                self.figures.token(live, now)
            if finish is not None or token == BAD_TOKEN:
                ended.append(self.live.pop(seq.id))
        self.figures.ended = now
        return ended
