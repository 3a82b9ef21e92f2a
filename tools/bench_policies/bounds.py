"""What no scheduler can beat: requests on a single server that only one of them uses at a time."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from asyncllm.executor.sim.cost import SimCost
from tools.bench_policies.load import Load


def prefill_work(load: Load, cost: SimCost, page_size: int, step_tokens: int) -> list[float]:
    """The least device time of each prompt, in seconds: its share of steps of ``step_tokens``.

    These are the largest steps, in which a token costs least. Only tokens that no earlier prompt
    had are computed, as with a cache without end.
    """
    cached = load.cached(page_size)
    rows = zip(load.requests, cached, strict=True)
    return [
        _marginal(cost, step_tokens, start, request.num_prompt - start) for request, start in rows
    ]


def _marginal(cost: SimCost, step_tokens: int, start: int, length: int) -> float:
    """What a row adds to a step that is full without it."""
    full = np.array([0]), np.array([step_tokens])
    both = np.array([0, start]), np.array([step_tokens, length])
    return cost.seconds(*both, 1) - cost.seconds(*full, 1)


def srpt(arrivals: Sequence[float], work: Sequence[float]) -> list[float]:
    """Seconds from arrival to completion under shortest remaining processing time, preemptive.

    No order of a single server has a smaller mean (Schrage, 1968). With the prefill work of
    prompts, that bounds the mean TTFT of any scheduler on one device: it has to do at least this
    work for each prompt before its first token, and decoding takes more time besides. (With a
    shared prefix, its work is that of the prompt that comes first. Whoever else computes it does
    the work that this one needs.)

    Args:
        arrivals: rising.
        work: seconds.
    """
    flow = [0.0] * len(work)
    waiting: list[tuple[float, int]] = []  # (work left, request)
    now = 0.0
    for id, arrival in enumerate([*arrivals, float("inf")]):
        while waiting and now < arrival:
            left, shortest = heappop(waiting)
            if now + left > arrival:
                heappush(waiting, (left - (arrival - now), shortest))
                now = arrival
            else:
                now += left
                flow[shortest] = now - arrivals[shortest]
        now = max(now, arrival)
        if id < len(work):
            heappush(waiting, (work[id], id))
    return flow


def total_work(load: Load, cost: SimCost, page_size: int, step_tokens: int) -> list[float]:
    """The least device time of each request, in seconds: of its prompt and its decode rows."""
    prompts = prefill_work(load, cost, page_size, step_tokens)
    return [
        seconds + (request.num_output - 1) * _marginal(cost, step_tokens, request.num_prompt, 1)
        for request, seconds in zip(load.requests, prompts, strict=True)
    ]


def due_times(load: Load, cost: SimCost, step_tokens: int) -> list[float]:
    """When one server must be done with each request, so that its tokens can come in time.

    Tokens come one after the other, each a step of its own, however few share it. While a request
    waits for its steps, the server may work for others.
    """
    one = np.array([1])
    due = []
    for request in load.requests:
        step = cost.seconds(np.array([request.num_prompt]), one, 1)
        own = _marginal(cost, step_tokens, request.num_prompt, 1)
        due.append(
            request.arrival + request.deadline - (request.num_output - 1) * max(0.0, step - own)
        )
    return due


def edf(arrivals: Sequence[float], work: Sequence[float], due: Sequence[float]) -> list[bool]:
    """Which requests are done in time: earliest due date first, preemptive, with admission.

    At each arrival, as many as can be in time are chosen of all that wait (Moore and Hodgson,
    1968). So no order meets more if all arrive together. If not, only one that knows the future
    could.

    Args:
        arrivals: rising.
        work: seconds.
        due: when each must be done.
    """
    met = [False] * len(work)
    left = list(work)
    waiting: list[tuple[float, int]] = []  # (due, request), ascending
    for last, (now, until) in enumerate(pairwise([*arrivals, float("inf")])):
        insort(waiting, (due[last], last))
        if now == until:
            continue
        for id in _most_in_time(waiting, left, now):
            spent = min(left[id], until - now)
            now += spent
            left[id] -= spent
            if left[id] > 0.0:
                break
            met[id] = True
        waiting = [(end, id) for end, id in waiting if not met[id] and until + left[id] <= end]
    return met


def _most_in_time(waiting: list[tuple[float, int]], left: list[float], now: float) -> list[int]:
    """The most requests that one after the other are in time, in this order.

    Whenever one of them would be late, the one with the most work up to there goes.
    """
    chosen: list[tuple[float, int]] = []  # (-work, request)
    dropped: set[int] = set()
    for due, id in waiting:
        now += left[id]
        heappush(chosen, (-left[id], id))
        if now > due:
            work, most = heappop(chosen)
            now += work
            dropped.add(most)
    return [id for _, id in waiting if id not in dropped]
