"""What happened to a request, as JSON for people.

Pure functions over the engine's ``RequestTrace``. Traces come with the index of their choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from asyncllm.engine.requests.history import RequestTrace, StepRecord
from asyncllm.engine.scheduling.timeline import Event
from asyncllm.server.http.answer import Answer

#: Most choices of a request in its trace, and most steps listed for all of them together. Bounded,
#: because the trace is made on the event loop.
MAX_SEQUENCES: Final = 16
MAX_STEPS_DETAIL: Final = 256

#: Names of ``a`` and ``b`` of an event (``engine/scheduling/timeline.py``).
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "queued": ("ahead",),
    "shares": (),
    "loading": ("pages",),
    "admitted": ("slot", "cached_tokens"),
    "chunk": ("start", "tokens"),
    "preempted": ("tokens",),
    "finished": ("tokens",),
    "pinned": ("pages", "ttl_ms"),
}
#: Events of planning a step; the others happen between steps.
_IN_A_PLAN: Final = frozenset(("shares", "loading", "admitted", "chunk", "preempted"))


class TraceSequence(Answer, kw_only=True):
    """What happened to one choice; times are in milliseconds since the request arrived."""

    index: int
    outcome: str
    tenant: str
    priority: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    waited_ms: dict[str, float]
    started_ms: float | None
    first_token_ms: float | None
    ended_ms: float | None
    events: list[dict[str, Any]]
    events_dropped: int
    steps: dict[str, float | None]
    steps_detail: list[dict[str, float | None]]


class Trace(Answer, kw_only=True):
    """The trace of one request, by choice."""

    sequences: list[TraceSequence]


def explain(traces: Sequence[tuple[int, RequestTrace]]) -> Trace:
    """A ``Trace``, with one entry for each sequence.

    ``waited_ms`` divides the time in the queue by what the queue's head was waiting for. ``steps``
    summarises the steps that ran while the sequence was in the batch; their rows include its own.
    ``steps_detail`` lists the latest of them.
    """
    most = MAX_STEPS_DETAIL // max(1, len(traces))
    return Trace(sequences=[_sequence(index, trace, most) for index, trace in traces])


def _sequence(index: int, trace: RequestTrace, most_steps: int) -> TraceSequence:
    start = trace.arrived
    steps = _steps_in_batch(trace)
    return TraceSequence(
        index=index,
        outcome=trace.outcome,
        tenant=trace.tenant,
        priority=trace.priority,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        completion_tokens=trace.completion_tokens,
        waited_ms={reason: _ms(seconds) for reason, seconds in trace.waited.items()},
        started_ms=_since(start, trace.started),
        first_token_ms=_since(start, trace.first_token),
        ended_ms=_since(start, trace.ended),
        events=[_event(start, event) for event in trace.events],
        events_dropped=trace.num_events_dropped,
        steps=_summary(steps),
        steps_detail=[_step(start, step) for step in steps[-most_steps:]],
    )


def _event(start: float, event: Event) -> dict[str, Any]:
    return {"at_ms": _ms(event.time - start), "kind": event.kind, **event_fields(event)}


def event_fields(event: Event) -> dict[str, int]:
    """What an event says, by name."""
    fields = dict(zip(_FIELDS.get(event.kind, ()), (event.a, event.b), strict=False))
    return {"step": event.step, **fields} if event.kind in _IN_A_PLAN else fields


def _step(start: float, step: StepRecord) -> dict[str, Any]:
    """Times are null until the step has come back from the device."""
    done = step.seconds > 0
    return {
        "step": step.step,
        "planned_ms": _ms(step.planned - start),
        "began_ms": _ms(step.begun - start) if done else None,
        "ms": _ms(step.seconds) if done else None,
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "prompt_tokens": step.num_prompt_tokens,
        "drafted_tokens": step.num_drafted,
        "accepted_tokens": step.num_right,
    }


def _summary(steps: Sequence[StepRecord]) -> dict[str, Any]:
    rows = [step.num_rows for step in steps]
    seconds = [step.seconds for step in steps if step.seconds > 0]
    return {
        "count": len(steps),
        "mean_rows": round(sum(rows) / len(rows), 1) if rows else None,
        "min_rows": min(rows, default=None),
        "max_rows": max(rows, default=None),
        "mean_ms": _ms(sum(seconds) / len(seconds)) if seconds else None,
        "max_ms": _ms(max(seconds)) if seconds else None,
    }


def _steps_in_batch(trace: RequestTrace) -> list[StepRecord]:
    """The steps that were planned while the sequence was in the batch."""
    stays = list(_stays(trace))
    return [s for s in trace.steps if any(begin <= s.planned < end for begin, end in stays)]


def _stays(trace: RequestTrace) -> Iterator[tuple[float, float]]:
    begin = None
    for event in trace.events:
        if event.kind == "admitted":
            begin = event.time
        elif event.kind in ("preempted", "finished") and begin is not None:
            yield begin, event.time
            begin = None
    if begin is None and trace.num_events_dropped:
        begin = trace.events[-1].time  # it may have come back since
    if begin is not None:
        yield begin, math.inf if trace.ended is None else trace.ended


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _since(start: float, time: float | None) -> float | None:
    return None if time is None else _ms(time - start)
