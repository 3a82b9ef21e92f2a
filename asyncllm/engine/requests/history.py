"""History: the latest steps, and traces of the latest requests."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from itertools import islice
from operator import attrgetter

import msgspec

from asyncllm.engine.requests.stream import OutputStream
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.step import Planned
from asyncllm.engine.scheduling.timeline import Event
from asyncllm.wire.messages import NO_TOKEN, StepResult, unpack

#: How many steps and ended requests are kept.
KEPT_STEPS = 4096
KEPT_REQUESTS = 1024

WAITING = (SeqState.WAITING, SeqState.LOADING)


class StepRecord(msgspec.Struct):
    """One step. ``begun`` and ``seconds`` are 0 until it is done. Times by the engine's clock.

    The first ``num_decodes`` of its rows are decode rows, the others prompt chunks. Decode rows
    verify ``num_drafted`` tokens, of which ``num_right`` turned out to be right.
    """

    step: int
    planned: float
    num_rows: int
    num_tokens: int
    begun: float = 0.0
    seconds: float = 0.0
    num_decodes: int = 0
    num_drafted: int = 0
    num_right: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt chunks. Beside them, a decode row has one token and its draft."""
        others = self.num_decodes + self.num_drafted
        return self.num_tokens - others if self.num_rows > self.num_decodes else 0


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One request explained. All times are seconds of the engine's clock.

    Attributes:
        outcome: its finish reason, "abort", "deadline" or "error"; "running" or "waiting" while
            it lives.
        waited: seconds in the queue, by what the head of the queue was waiting for.
        started, first_token, ended: None before.
        events: what the scheduler did with it.
        num_events_dropped: events beyond those kept.
        steps: those of the latest steps that ran between its start and its end.
    """

    request_id: int
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    priority: int
    tenant: str
    waited: dict[str, float]
    arrived: float
    started: float | None
    first_token: float | None
    ended: float | None
    events: list[Event]
    num_events_dropped: int
    steps: list[StepRecord]


class History:
    """Bounded, and cheap enough to be always on."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._requests: OrderedDict[int, RequestTrace] = OrderedDict()

    def planned(self, plan: Planned, now: float) -> None:
        """A step was submitted."""
        num_rows = len(plan.message.rows) // 12
        record = StepRecord(
            plan.message.step,
            now,
            num_rows,
            plan.num_tokens,
            num_decodes=plan.num_decodes,
            num_drafted=len(unpack(plan.message.drafts)),
        )
        self._steps.append(record)

    def done(self, result: StepResult) -> None:
        """A step has ended. Steps end in order, so it is one of the latest."""
        record = self._steps[result.step - self._steps[-1].step - 1]
        record.begun, record.seconds = result.t_done - result.seconds, result.seconds
        if record.num_drafted and result.error is None:
            beyond_first = unpack(result.tokens)[record.num_rows :]
            record.num_right = int((beyond_first != NO_TOKEN).sum())

    def ended(self, seq: Sequence, stream: OutputStream, outcome: str, now: float) -> None:
        """A request has ended."""
        self._requests[seq.id] = _explain(seq, stream, outcome, now)
        if len(self._requests) > KEPT_REQUESTS:
            self._requests.popitem(last=False)

    def latest_steps(self, most: int) -> list[StepRecord]:
        """The steps submitted last, the newest at the end."""
        return list(self._steps)[-most:]  # one atomic copy: another thread may ask

    def latest_ended(self) -> list[RequestTrace]:
        """The requests kept that have ended, the latest first; without their steps."""
        return list(reversed(self._requests.values()))

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        """The trace of a request that has ended; None when it is forgotten."""
        trace = self._requests.get(request_id)
        return self._with_steps(trace) if trace is not None and steps else trace

    def live_trace(
        self, seq: Sequence, stream: OutputStream, *, steps: bool = True
    ) -> RequestTrace:
        """The trace of a request that lives."""
        outcome = "waiting" if stream.started == 0.0 or seq.state in WAITING else "running"
        trace = _explain(seq, stream, outcome, None)
        return self._with_steps(trace) if steps else trace

    def _with_steps(self, trace: RequestTrace) -> RequestTrace:
        if trace.started is None:
            return trace
        end = math.inf if trace.ended is None else trace.ended
        planned = attrgetter("planned")
        first = bisect_left(self._steps, trace.started, key=planned)
        last = bisect_right(self._steps, end, lo=first, key=planned)
        return msgspec.structs.replace(trace, steps=list(islice(self._steps, first, last)))


def _explain(
    seq: Sequence, stream: OutputStream, outcome: str, ended: float | None
) -> RequestTrace:
    timeline = seq.timeline
    return RequestTrace(
        request_id=seq.id,
        outcome=outcome,
        prompt_tokens=seq.num_prompt,
        completion_tokens=seq.num_output,
        cached_tokens=max(seq.num_cached, 0),
        priority=seq.service.priority,
        tenant=seq.service.tenant,
        waited=timeline.waited,
        arrived=timeline.arrival,
        started=stream.started or None,
        first_token=stream.first or None,
        ended=ended,
        events=timeline.events,
        num_events_dropped=timeline.num_dropped,
        steps=[],
    )
