"""What GET /live answers: the engine's ``LiveView`` as one viewer may see it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from asyncllm.engine.requests.history import RequestTrace, StepRecord
from asyncllm.engine.scheduling.waiting.reason import Reason
from asyncllm.engine.stats import EngineStats
from asyncllm.server.arrivals.names import Numbers
from asyncllm.server.http.answer import Answer
from asyncllm.server.http.traffic import Waits
from asyncllm.server.service import Service

if TYPE_CHECKING:
    from asyncllm.engine.requests.view import LiveRequest, LiveView

T = TypeVar("T", bound=Answer)

#: Seconds between two views, at least.
INTERVAL_SECONDS: Final = 0.5
#: Rows of requests, of each kind: running, waiting, ended.
MOST_ROWS: Final = 64


class _Row(Answer, kw_only=True):
    name: str
    replica: int
    tenant: str
    first_token_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    waited_ms: dict[str, float]


class LiveRow(_Row, kw_only=True):
    """A request that runs or waits. Of other keys' requests, only state and sizes are shown.

    ``reason`` says why it waits, ``ahead`` how many of the same key come before it, and
    ``blocked_by`` the id of the request that computes the prefix it waits for. ``needs`` and
    ``available`` are the pages that it is expected to need, and that it could have now. ``prefix``
    numbers what several running requests found in the prefix cache; -1 is none.
    """

    id: int | None
    state: Literal["waiting", "prefill", "decode"]
    age_ms: float
    prompt_left: int
    max_output_tokens: int
    pages: int
    own_pages: int
    prefix: int
    preemptions: int
    reason: Reason | None
    ahead: int
    needs: int
    available: int
    blocked_by: int | None


class EndedRow(_Row, kw_only=True):
    """A request that has ended; times are since its arrival."""

    id: int
    outcome: str
    ended_ago_ms: float
    started_ms: float | None
    total_ms: float


class LiveStep(Answer, array_like=True):
    """One step, as an array; ``began_ms`` is of the same clock as ``time_ms``.

    While it runs, ``ms`` is null and ``began_ms`` says when it was planned. Decode rows verify
    ``drafted`` tokens, of which ``accepted`` were right.
    """

    step: int
    began_ms: float
    ms: float | None
    decode_rows: int
    chunks: int
    prompt_tokens: int
    replica: int
    drafted: int
    accepted: int


class LivePrefix(Answer, kw_only=True):
    """A prefix that running requests share; ``prefix`` is the same number as in their rows."""

    prefix: int
    requests: int
    pages: int


class LivePages(Answer, kw_only=True):
    """KV pages. ``own`` are of one running request each, ``shared`` of several, or being copied.

    ``states`` are all slots for recurrent states, 0 for models without them.
    """

    total: int
    page_size: int
    free: int
    cached: int
    pinned: int
    own: int
    shared: int
    states: int
    states_running: int
    states_cached: int


class LiveTotals(Answer, kw_only=True):
    """Counters since the start, which only grow: their differences are rates."""

    prompt_tokens: int
    generation_tokens: int
    admitted_tokens: int
    cached_tokens: int
    steps: int
    preemptions: int
    pages_evicted: int
    finished: dict[str, int]
    errors: dict[str, int]
    loop_cpu_ms: float
    device_busy_ms: float


class LiveState(Answer, kw_only=True):
    """How things stand. Lists are bounded; ``num_running`` and ``num_waiting`` count all.

    ``sees_all``: rows of all keys' requests are whole; ``admin_sees_more``: with the admin key.
    ``replicas`` are shown together, a single server as number 0; ``missing`` do not answer.
    """

    model: str
    replicas: list[int]
    missing: list[int]
    time_ms: float
    interval_ms: float
    sees_all: bool
    admin_sees_more: bool
    draining: bool
    num_running: int
    num_waiting: int
    num_reserved: int
    max_running: int
    max_waiting: int
    itl_target_ms: float
    lag_ms: float
    longest_lag_ms: float
    totals: LiveTotals
    pages: LivePages
    prefixes: list[LivePrefix]
    running: list[LiveRow]
    waiting: list[LiveRow]
    ended: list[EndedRow]
    steps: list[LiveStep]


def live_state(
    service: Service, view: LiveView, viewer: str | None, lag: Waits, numbers: Numbers
) -> LiveState:
    """What a viewer gets of a view.

    Args:
        viewer: the tenant whose requests are shown; None for all.
        lag: of the event loop.
        numbers: make ids.
    """
    llm, now = service.llm, view.time
    limits, stats = llm.limits, llm.stats

    def is_own(tenant: str) -> bool:
        return viewer is None or tenant == viewer

    def name_of(engine_id: int) -> str:
        served = service.log.find_sequence(engine_id)
        return served.names[0] if served is not None and served.names else ""

    def rows(requests: Iterable[LiveRequest]) -> list[LiveRow]:
        """At most MOST_ROWS of the viewer's own requests, and of those of others."""
        found: list[LiveRow] = []
        listed = {True: 0, False: 0}
        for request in requests:
            own = is_own(request.tenant)
            if listed[own] < MOST_ROWS:
                listed[own] += 1
                found.append(_row(request, now, name_of(request.id) if own else None, numbers))
        return found

    own_ended = islice((trace for trace in view.ended if is_own(trace.tenant)), MOST_ROWS)
    return LiveState(
        model=service.model_names[0],
        replicas=[numbers.replica or 0],
        missing=[],
        time_ms=_in_ms(now),
        interval_ms=INTERVAL_SECONDS * 1e3,
        sees_all=viewer is None,
        admin_sees_more=viewer is not None and service.config.admin_key is not None,
        draining=service.draining,
        num_running=stats.running,
        num_waiting=stats.waiting,
        num_reserved=llm.num_reserved,
        max_running=limits.max_num_seqs,
        max_waiting=limits.max_waiting,
        itl_target_ms=limits.itl_target * 1e3,
        lag_ms=_in_ms(lag.last),
        longest_lag_ms=_in_ms(lag.longest),
        totals=_copied(
            LiveTotals,
            stats,
            loop_cpu_ms=_in_ms(time.thread_time()),
            device_busy_ms=_in_ms(stats.device_busy),
        ),
        pages=_pages(view, stats, limits.page_size),
        prefixes=[
            _copied(LivePrefix, each, prefix=_prefix_at(numbers, each.first_page))
            for each in view.prefixes
        ],
        running=rows(view.running),
        waiting=rows(view.waiting),
        ended=[_ended(trace, now, name_of(trace.request_id), numbers) for trace in own_ended],
        steps=[_step(step, numbers) for step in view.steps],
    )


def _pages(view: LiveView, stats: EngineStats, page_size: int) -> LivePages:
    own = min(view.own_pages, stats.pages_held)
    return LivePages(
        total=stats.pages_total,
        page_size=page_size,
        free=stats.pages_total - stats.pages_held - stats.pages_cached,
        cached=stats.pages_cached,
        pinned=stats.pages_pinned,
        own=own,
        shared=stats.pages_held - own,
        states=stats.states_total,
        states_running=stats.states_running,
        states_cached=stats.states_cached,
    )


def _row(request: LiveRequest, now: float, name: str | None, numbers: Numbers) -> LiveRow:
    """``name``: None for a request of somebody else."""
    own, first = name is not None, request.blocked_by
    _, left, own_pages, prefix_page = request.progress or (0, 0, 0, -1)
    reason, ahead, needs, available, *_ = request.wait or (None, 0, 0, 0)
    return _copied(
        LiveRow,
        request,
        id=numbers.shown(request.id) if own else None,
        name=name or "",
        replica=numbers.replica or 0,
        tenant=request.tenant if own else "",
        state="waiting" if request.progress is None else "prefill" if left else "decode",
        age_ms=_in_ms(now - request.arrived),
        first_token_ms=None if request.first_token is None else _in_ms(request.first_token),
        prompt_left=left,
        own_pages=own_pages,
        prefix=_prefix_at(numbers, prefix_page),
        waited_ms={reason: _in_ms(seconds) for reason, seconds in request.waited.items()},
        reason=reason,
        ahead=ahead,
        needs=needs,
        available=available,
        blocked_by=numbers.shown(first) if own and first is not None else None,
    )


def _prefix_at(numbers: Numbers, page: int) -> int:
    """The number that clients see of the prefix that begins with this page; -1 is none."""
    return page if page < 0 else numbers.shown(page)


def _ended(trace: RequestTrace, now: float, name: str, numbers: Numbers) -> EndedRow:
    """The row of a request that has ended."""
    start = trace.arrived
    ended = now if trace.ended is None else trace.ended
    return _copied(
        EndedRow,
        trace,
        id=numbers.shown(trace.request_id),
        name=name,
        replica=numbers.replica or 0,
        ended_ago_ms=_in_ms(now - ended),
        started_ms=None if trace.started is None else _in_ms(trace.started - start),
        first_token_ms=None if trace.first_token is None else _in_ms(trace.first_token - start),
        total_ms=_in_ms(ended - start),
        output_tokens=trace.completion_tokens,
        waited_ms={reason: _in_ms(seconds) for reason, seconds in trace.waited.items()},
    )


def _step(step: StepRecord, numbers: Numbers) -> LiveStep:
    done = step.seconds > 0
    return LiveStep(
        step.step,
        _in_ms(step.begun if done else step.planned),
        _in_ms(step.seconds) if done else None,
        step.num_decodes,
        step.num_rows - step.num_decodes,
        step.num_prompt_tokens,
        numbers.replica or 0,
        step.num_drafted,
        step.num_right,
    )


def _in_ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _copied(kind: type[T], source: object, **others: Any) -> T:
    """An answer that has its fields, ``others`` excepted, from attributes of the same names."""
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**{name: getattr(source, name) for name in names}, **others)
