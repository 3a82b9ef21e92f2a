"""LiveView: the requests, steps and pages of this moment, bounded in size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from asyncllm.engine.requests.history import WAITING, History, RequestTrace, StepRecord
from asyncllm.engine.requests.request import Request
from asyncllm.engine.scheduling.batch import Progress
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.waiting.reason import Wait

#: Live requests that one view looks at, at most.
MOST_LOOKED_AT = 2048
#: Steps, and prefixes in use, that it lists at most.
MOST_STEPS, MOST_PREFIXES = 256, 16


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that runs or waits. It has a ``wait`` or a ``progress``.

    Attributes:
        arrived: seconds of the engine's clock.
        first_token: seconds after ``arrived``; None before.
        waited: seconds in the queue, by what its head was waiting for.
        blocked_by: the request that computes the prefix it waits for.
    """

    id: int
    tenant: str
    arrived: float
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_output_tokens: int
    pages: int
    preemptions: int
    waited: dict[str, float]
    wait: Wait | None = None
    blocked_by: int | None = None
    progress: Progress | None = None


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the prefix cache in use: how many running requests found at least ``pages``."""

    first_page: int
    requests: int
    pages: int


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """The requests, steps and pages of this moment.

    Attributes:
        time: now, in seconds of the engine's clock.
        running, waiting: the oldest, and of each tenant at least its own oldest. With many
            tenants there are more of them than asked for.
        ended: those kept, the latest first; without their steps.
        own_pages: pages of all running requests that they did not find in the cache.
    """

    time: float
    running: list[LiveRequest]
    waiting: list[LiveRequest]
    ended: list[RequestTrace]
    steps: list[StepRecord]
    own_pages: int
    prefixes: list[Prefix]


def live_view(
    requests: Iterable[Request], scheduler: Scheduler, history: History, now: float, most: int
) -> LiveView:
    """Look at all of them; it takes one or two milliseconds with 256 running.

    Args:
        requests: in the order of their arrival.
        now: seconds of the engine's clock.
        most: requests to list, of those that run and wait.
    """
    running: list[LiveRequest] = []
    waiting: list[LiveRequest] = []
    listed: Counter[tuple[str, bool]] = Counter()
    for request, _ in zip(requests, range(MOST_LOOKED_AT), strict=False):
        seq = request.sequence
        if seq.state is SeqState.FINISHED:
            continue
        waits = seq.state in WAITING
        rows = waiting if waits else running
        key = seq.service.tenant, waits
        if len(rows) < most or listed[key] < most:
            listed[key] += 1
            rows.append((_waiting if waits else _running)(request, scheduler))
    progress = [scheduler.batch.progress(seq) for seq in scheduler.batch.running.values()]
    return LiveView(
        time=now,
        running=running,
        waiting=waiting,
        ended=history.latest_ended(),
        steps=history.latest_steps(MOST_STEPS),
        own_pages=sum(each.own_pages for each in progress),
        prefixes=_prefixes(scheduler.batch.running.values(), progress),
    )


def _prefixes(running: Iterable[Sequence], progress: list[Progress]) -> list[Prefix]:
    """The prefixes that most requests share."""
    users: Counter[int] = Counter()
    pages: dict[int, int] = {}
    for seq, each in zip(running, progress, strict=True):
        page = each.prefix_page
        if page >= 0:
            users[page] += 1
            found = len(seq.kv.pages) - each.own_pages
            pages[page] = min(found, pages.get(page, found))
    return [
        Prefix(first_page=page, requests=count, pages=pages[page])
        for page, count in users.most_common(MOST_PREFIXES)
    ]


def _running(request: Request, scheduler: Scheduler) -> LiveRequest:
    return _live(request, progress=scheduler.batch.progress(request.sequence))


def _waiting(request: Request, scheduler: Scheduler) -> LiveRequest:
    wait, other = scheduler.backlog.why(request.sequence), None
    if wait.reason == "prefix":
        other = computes(scheduler.batch.running.values(), wait)
    return _live(request, wait=wait, blocked_by=None if other is None else other.id)


def computes(running: Iterable[Sequence], wait: Wait) -> Sequence | None:
    """Which of the running sequences computes the prefix that is waited for."""
    last = wait.prefix_pages - 1
    having = (
        seq for seq in running if len(seq.kv.pages) > last and seq.kv.pages[last] == wait.page
    )
    return next(having, None)


def _live(
    request: Request,
    wait: Wait | None = None,
    blocked_by: int | None = None,
    progress: Progress | None = None,
) -> LiveRequest:
    seq, stream = request.sequence, request.stream
    timeline = seq.timeline
    return LiveRequest(
        id=seq.id,
        tenant=seq.service.tenant,
        arrived=timeline.arrival,
        first_token=stream.first - timeline.arrival if stream.first else None,
        prompt_tokens=seq.num_prompt,
        cached_tokens=max(seq.num_cached, 0),
        output_tokens=seq.num_output,
        max_output_tokens=seq.output.max_length - seq.num_prompt,
        pages=len(seq.kv.pages),
        preemptions=sum(event.kind == "preempted" for event in timeline.events),
        waited=timeline.waited,
        wait=wait,
        blocked_by=blocked_by,
        progress=progress,
    )
