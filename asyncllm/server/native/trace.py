"""What happened to a request, for people: as JSON, and as a file for Perfetto's timeline viewer.

Pure functions over the engine's ``RequestTrace``. Traces come with the index of their choice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncllm.engine.requests.history import RequestTrace, StepRecord
    from asyncllm.engine.scheduling.timeline import Event

#: Choices of one request that are explained, and steps listed for all of them together. Bounded, as
#: this is worked out on the event loop.
MAX_SEQUENCES = 16
MAX_STEPS_DETAIL = 256

#: What ``a`` and ``b`` of an event are (``engine/scheduling/timeline.py``).
_FIELDS: dict[str, tuple[str, ...]] = {
    "queued": ("ahead",),
    "shares": (),
    "loading": ("pages",),
    "admitted": ("slot", "cached_tokens"),
    "chunk": ("start", "tokens"),
    "preempted": ("tokens",),
    "finished": ("tokens",),
}
#: These are decided while the step of that number is planned; the others between steps.
_IN_A_PLAN = frozenset(("shares", "loading", "admitted", "chunk", "preempted"))
#: The state in which an event leaves the request; chunks leave it as it is.
_STATES = {
    "queued": "waiting",
    "shares": "waiting for a shared prefix",
    "loading": "loading from the host",
    "admitted": "running",
    "preempted": "preempted",
}


class Span(NamedTuple):
    """Seconds of the engine's clock."""

    name: str
    begin: float
    end: float


# -- JSON ------------------------------------------------------------------------------------------


def explain(traces: Sequence[tuple[int, RequestTrace]]) -> dict[str, Any]:
    """One entry for each sequence; times are milliseconds from its arrival.

    ``waited_ms`` is the time in the queue by what the queue's head was waiting for. ``steps`` are
    those that ran while the sequence was in the batch; their rows include its own.
    ``steps_detail`` lists the latest of them.
    """
    most = MAX_STEPS_DETAIL // max(1, len(traces))
    return {"sequences": [_sequence(index, trace, most) for index, trace in traces]}


def _sequence(index: int, trace: RequestTrace, most_steps: int) -> dict[str, Any]:
    start = trace.arrived
    steps = _steps_in_batch(trace)
    return {
        "index": index,
        "outcome": trace.outcome,
        "tenant": trace.tenant,
        "priority": trace.priority,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "completion_tokens": trace.completion_tokens,
        "waited_ms": {reason: _ms(seconds) for reason, seconds in trace.waited.items()},
        "started_ms": _since(start, trace.started),
        "first_token_ms": _since(start, trace.first_token),
        "ended_ms": _since(start, trace.ended),
        "events": [_event(start, event) for event in trace.events],
        "events_dropped": trace.num_events_dropped,
        "steps": _summary(steps),
        "steps_detail": [_step(start, step) for step in steps[-most_steps:]],
    }


def _event(start: float, event: Event) -> dict[str, Any]:
    fields = dict(zip(_FIELDS.get(event.kind, ()), (event.a, event.b), strict=False))
    step = {"step": event.step} if event.kind in _IN_A_PLAN else {}
    return {"at_ms": _ms(event.time - start), "kind": event.kind, **step, **fields}


def _step(start: float, step: StepRecord) -> dict[str, Any]:
    """Without times when it has not come back from the device."""
    done = step.seconds > 0
    return {
        "step": step.step,
        "planned_ms": _ms(step.planned - start),
        "began_ms": _ms(step.begun - start) if done else None,
        "ms": _ms(step.seconds) if done else None,
        "rows": step.num_rows,
        "tokens": step.num_tokens,
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


# -- Perfetto --------------------------------------------------------------------------------------

_ENGINE = 1
_STATE, _CHUNKS = 1, 2


def perfetto(name: str, traces: Sequence[tuple[int, RequestTrace]]) -> dict[str, Any]:
    """A file in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

    One process for the engine's steps, and one for each sequence with its states and its chunks.
    Times are microseconds from the first arrival.
    """
    start = min(trace.arrived for _, trace in traces)
    steps = {step.step: step for _, trace in traces for step in trace.steps if step.seconds > 0}
    events = [_names(_ENGINE, "engine"), _names(_ENGINE, "steps", tid=1)]
    for step in steps.values():
        args = {"step": step.step, "rows": step.num_rows, "tokens": step.num_tokens}
        span = Span(f"{step.num_rows} rows", step.begun, step.begun + step.seconds)
        events.append(_slice(start, _ENGINE, 1, span, args))
    for index, trace in traces:
        events += _tracks(start, _ENGINE + 1 + index, f"{name} choice {index}", trace, steps)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tracks(
    start: float, pid: int, name: str, trace: RequestTrace, steps: dict[int, StepRecord]
) -> list[dict[str, Any]]:
    """The tracks of one sequence."""
    events = [_names(pid, name), _names(pid, "state", tid=_STATE), _names(pid, "chunks", _CHUNKS)]
    events += [_slice(start, pid, _STATE, span, {}) for span in states(trace)]
    for event in trace.events:
        if event.kind == "chunk":
            span = _chunk_span(event, steps.get(event.step))
            args = {"step": event.step, "start": event.a, "tokens": event.b}
            events.append(_slice(start, pid, _CHUNKS, span, args))
    if trace.first_token is not None:
        moment = {"ph": "i", "s": "t", "name": "first token", "pid": pid, "tid": _STATE}
        events.append({**moment, "ts": _us(trace.first_token - start)})
    return events


def states(trace: RequestTrace) -> list[Span]:
    """What the sequence was doing from its arrival to its end, or until now."""
    spans = []
    name, begin = "", trace.arrived
    for event in trace.events:
        if event.kind in _STATES:
            if name:
                spans.append(Span(name, begin, event.time))
            name, begin = _STATES[event.kind], event.time
    if name:
        spans.append(Span(name, begin, max(begin, _last_known(trace))))
    return spans


def _last_known(trace: RequestTrace) -> float:
    if trace.ended is not None:
        return trace.ended
    times = [event.time for event in trace.events]
    times += [step.begun + step.seconds for step in trace.steps]
    return max(times, default=trace.arrived)


def _chunk_span(event: Event, step: StepRecord | None) -> Span:
    """When its step ran; a moment where that is not known any more, or not yet."""
    name = f"{event.b} tokens"
    if step is None:
        return Span(name, event.time, event.time)
    return Span(name, step.begun, step.begun + step.seconds)


def _slice(start: float, pid: int, tid: int, span: Span, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": pid,
        "tid": tid,
        "ts": _us(span.begin - start),
        "dur": _us(span.end - span.begin),
        "args": args,
    }


def _names(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    """The name of a process, or of one of its threads, which the viewers draw as tracks."""
    head: dict[str, Any] = {"ph": "M", "pid": pid, "args": {"name": name}}
    if tid is None:
        return {**head, "name": "process_name"}
    return {**head, "name": "thread_name", "tid": tid}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
