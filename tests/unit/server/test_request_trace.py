"""How traces are presented."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from asyncllm.engine.requests.history import RequestTrace, StepRecord
from asyncllm.engine.scheduling.timeline import Event
from asyncllm.server.trace import MAX_STEPS_DETAIL, explain

#: Arrives at 100 s, shares a prefix, loads, runs, is preempted, runs again and ends at 101 s.
EVENTS = [
    Event(100.0, 6, "queued", 3, 0),
    Event(100.1, 7, "shares", 0, 0),
    Event(100.2, 8, "loading", 5, 0),
    Event(100.3, 9, "admitted", 2, 16),
    Event(100.3, 9, "chunk", 16, 84),
    Event(100.5, 11, "preempted", 102, 0),
    Event(100.7, 13, "admitted", 1, 96),
    Event(100.7, 13, "chunk", 96, 6),
    Event(100.9, 14, "finished", 105, 0),
    Event(100.9, 14, "pinned", 6, 30_000),
]
#: A step every 0.1 s, each 50 ms long and beginning 10 ms after it was planned; the last one is
#: still on the device.
STEPS = [
    StepRecord(9 + i, 100.3 + i / 10, 4 + i, 40 + i, 100.31 + i / 10, 0.05, 3) for i in range(6)
] + [StepRecord(15, 100.95, 9, 9)]

TRACE = RequestTrace(
    request_id=1,
    outcome="length",
    prompt_tokens=100,
    completion_tokens=5,
    cached_tokens=16,
    priority=-1,
    tenant="key-2",
    waited={"slots": 0.25, "pages": 0.0, "budget": 0.05},
    arrived=100.0,
    started=100.3,
    first_token=100.45,
    ended=101.0,
    events=EVENTS,
    num_events_dropped=0,
    steps=STEPS,
)
WAITING = msgspec.structs.replace(
    TRACE,
    outcome="waiting",
    started=None,
    first_token=None,
    ended=None,
    events=EVENTS[:1],
    steps=[],
)


def entry_of(trace: RequestTrace) -> Any:
    [entry] = json.loads(msgspec.json.encode(explain([(0, trace)])))["sequences"]
    return entry


def test_times_are_milliseconds_from_the_arrival() -> None:
    entry = entry_of(TRACE)
    assert (entry["started_ms"], entry["first_token_ms"], entry["ended_ms"]) == (300, 450, 1000)
    assert entry["waited_ms"] == {"slots": 250, "pages": 0, "budget": 50}
    assert [event["at_ms"] for event in entry["events"]] == [
        0, 100, 200, 300, 300, 500, 700, 700, 900, 900,
    ]  # fmt: skip
    assert (entry["tenant"], entry["priority"], entry["outcome"]) == ("key-2", -1, "length")
    counts = [entry[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")]
    assert counts == [100, 16, 5]


def test_events_have_fields_with_names() -> None:
    events = entry_of(TRACE)["events"]
    for event in events:
        del event["at_ms"]
    assert events == [
        {"kind": "queued", "ahead": 3},
        {"kind": "shares", "step": 7},
        {"kind": "loading", "step": 8, "pages": 5},
        {"kind": "admitted", "step": 9, "slot": 2, "cached_tokens": 16},
        {"kind": "chunk", "step": 9, "start": 16, "tokens": 84},
        {"kind": "preempted", "step": 11, "tokens": 102},
        {"kind": "admitted", "step": 13, "slot": 1, "cached_tokens": 96},
        {"kind": "chunk", "step": 13, "start": 96, "tokens": 6},
        {"kind": "finished", "tokens": 105},
        {"kind": "pinned", "pages": 6, "ttl_ms": 30_000},
    ]


def test_steps_are_those_in_which_it_was_in_the_batch() -> None:
    """Not those between a preemption and the return, nor those planned after its end."""
    entry = entry_of(TRACE)
    assert [step["step"] for step in entry["steps_detail"]] == [9, 10, 13, 14]
    assert entry["steps"] == {
        "count": 4,
        "mean_rows": 6.5,
        "min_rows": 4,
        "max_rows": 9,
        "mean_ms": 50,
        "max_ms": 50,
    }
    assert entry["steps_detail"][0] == {
        "step": 9,
        "planned_ms": 300,
        "began_ms": 310,
        "ms": 50,
        "rows": 4,
        "tokens": 40,
        "prompt_tokens": 37,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
    }


def test_a_step_on_the_device_has_no_times_yet() -> None:
    running = msgspec.structs.replace(
        TRACE, outcome="running", ended=None, events=EVENTS[:-2], num_events_dropped=0
    )
    entry = entry_of(running)
    last = entry["steps_detail"][-1]
    assert (last["step"], last["began_ms"], last["ms"]) == (15, None, None)
    assert entry["steps"]["count"] == 5
    assert entry["steps"]["mean_ms"] == 50, "of those that are done"


def test_a_request_that_still_waits() -> None:
    entry = entry_of(WAITING)
    assert (entry["started_ms"], entry["first_token_ms"], entry["ended_ms"]) == (None, None, None)
    assert entry["steps"]["count"] == 0
    assert entry["steps"]["mean_rows"] is entry["steps"]["mean_ms"] is None
    assert entry["steps_detail"] == []


def test_events_that_were_dropped() -> None:
    """Whatever happened after the last one that was kept: steps up to the end may be its own."""
    cut = msgspec.structs.replace(TRACE, events=EVENTS[:6], num_events_dropped=3)
    entry = entry_of(cut)
    assert entry["events_dropped"] == 3
    assert [step["step"] for step in entry["steps_detail"]] == [9, 10, 11, 12, 13, 14, 15]


def test_an_event_of_a_kind_to_come() -> None:
    later = msgspec.structs.replace(TRACE, events=[*EVENTS, Event(100.95, 15, "moved", 1, 2)])
    assert entry_of(later)["events"][-1] == {"at_ms": 950, "kind": "moved"}


def test_the_list_of_steps_is_bounded_for_all_sequences_together() -> None:
    steps = [StepRecord(i, 100.3 + i / 1e5, 2, 2, 100.3 + i / 1e5, 1e-5) for i in range(4096)]
    long = msgspec.structs.replace(TRACE, events=[EVENTS[0], EVENTS[3], EVENTS[-1]], steps=steps)
    entries = json.loads(msgspec.json.encode(explain([(0, long), (1, long)])))["sequences"]
    for entry in entries:
        assert entry["steps"]["count"] == 4096
        assert len(entry["steps_detail"]) == MAX_STEPS_DETAIL // 2
        assert entry["steps_detail"][-1]["step"] == 4095
