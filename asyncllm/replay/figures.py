"""Latency and throughput of a run, recorded or simulated."""

from __future__ import annotations

from array import array

import numpy as np

from asyncllm.replay.workload import LiveRequest


class Figures:
    """Collected during a run. Times in seconds.

    Attributes:
        ttft: from arrival to the first token, of each request that has one.
        itl: between consecutive tokens of a request, by the results of their steps.
        queue_wait: from arrival to the first step, of each request that has one.
        num_steps, num_tokens: steps, and generated tokens.
        prompt_tokens, cached_tokens: of admitted requests; those found in the prefix cache.
        begun, ended: times of the first and the last event.
    """

    def __init__(self) -> None:
        self.ttft = array("d")
        self.itl = array("d")
        self.queue_wait = array("d")
        self.num_requests = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.begun = 0.0
        self.ended = 0.0

    @property
    def makespan(self) -> float:
        """Seconds from the first event to the last."""
        return self.ended - self.begun

    @property
    def throughput(self) -> float:
        """Generated tokens per second; 0.0 when no time passed."""
        return self.num_tokens / self.makespan if self.makespan else 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def arrived(self, now: float) -> None:
        if not self.num_requests:
            self.begun = now
        self.num_requests += 1

    def admitted(self, live: LiveRequest, now: float) -> None:
        """A request takes part in a step; only the first time counts."""
        if live.started < 0:
            live.started = now
            self.queue_wait.append(now - live.request.arrival)
            self.prompt_tokens += live.seq.num_prompt
            self.cached_tokens += live.seq.num_cached

    def token(self, live: LiveRequest, now: float) -> None:
        self.num_tokens += 1
        if live.first < 0:
            live.first = now
            self.ttft.append(now - live.request.arrival)
        else:
            self.itl.append(now - live.last)
        live.last = now


def percentile(values: array[float], percent: float) -> float | None:
    """None when there are no values."""
    return float(np.percentile(values, percent)) if values else None
