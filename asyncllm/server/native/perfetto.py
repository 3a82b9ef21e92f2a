"""What happened to a request, as a file for Perfetto's timeline viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.engine.requests.history import RequestTrace, StepRecord
    from asyncllm.engine.scheduling.timeline import Event

#: State of the request after an event; chunks do not change it.
_STATES: Final = {
    "queued": "waiting",
    "shares": "waiting for a shared prefix",
    "loading": "loading from the host",
    "admitted": "running",
    "preempted": "preempted",
}


#: Process of the engine, and threads of a sequence's process.
_ENGINE: Final = 1
_STATE: Final = 1
_CHUNKS: Final = 2


class Span(NamedTuple):
    """Seconds of the engine's clock."""

    name: str
    begin: float
    end: float


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
    """The states of the sequence from its arrival to its end, or until now."""
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
    """When its step ran; an empty span if that is not known."""
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
    """Names a process, or one of its threads, which viewers draw as tracks."""
    head: dict[str, Any] = {"ph": "M", "pid": pid, "args": {"name": name}}
    if tid is None:
        return {**head, "name": "process_name"}
    return {**head, "name": "thread_name", "tid": tid}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
