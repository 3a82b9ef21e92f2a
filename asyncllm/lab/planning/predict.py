"""Predicted latency and throughput: the real scheduler serves a load in virtual time."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import msgspec
import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import POLICIES
from asyncllm.engine.recording.trace_file import NEW_ROOT, Trace
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.profile import HostTimes
from asyncllm.executor.sim.timeline import StepTiming
from asyncllm.lab.bench.cases import OnlineCase, Shot, warm_up
from asyncllm.lab.planning.cost import PredictedCost
from asyncllm.lab.planning.load import LoadPlan
from asyncllm.lab.replay.figures import Figures, percentile
from asyncllm.lab.replay.simulate import NEVER, Device, Simulation
from asyncllm.lab.replay.verify import verify
from asyncllm.lab.replay.workload import Workload, plain_arrival

#: A queue grows if the last third of the first tokens come so many times as late as the first
#: third, and so many seconds late.
GROWTH: Final = 3.0
LATE_SECONDS: Final = 1.0
#: Seconds between the warm-up and the load.
PAUSE: Final = 1.0


class Prediction(msgspec.Struct, frozen=True):
    """Figures of a load; times in seconds, None where no request has such a time.

    Attributes:
        tpot_p50: of each request, the mean time between its tokens.
        tokens_per_second: generated, by all replicas.
        is_growing: requests come faster than they are served, so waiting has no end.
    """

    load: str
    requests: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    tpot_p50: float | None
    tokens_per_second: float
    requests_per_second: float
    cached_share: float
    preemptions: int
    is_growing: bool


def predict(
    load: LoadPlan, limits: EngineLimits, cost: PredictedCost, policy: str, dp: int = 1
) -> Prediction:
    """Serve a load; with several replicas, one of them gets its even share.

    Raises:
        BadRequest: a request is longer than the context.
        TraceError, OSError: the trace cannot be read.
    """
    if load.case is None:
        return _prediction(load.name, _replay(load, limits, cost, policy), 1)
    case = share_of(load.case, dp)
    if case.longest > limits.max_model_len:
        raise BadRequest(
            f"load {load.name} has requests of {case.longest:,} tokens, and the longest context "
            f"that fits is {limits.max_model_len:,}",
            param="load",
        )
    clients = Clients(limits, cost, policy, load.prefix)
    clients.run(warm_up([case]), "warm-up")
    clients.run(case, "load")
    return _prediction(load.name, clients.figures.of_group("load"), dp)


def share_of(case: OnlineCase, dp: int) -> OnlineCase:
    """One of ``dp`` equal shares of a load."""
    return msgspec.structs.replace(
        case,
        shots=case.shots[::dp],
        clients=-(-case.clients // dp),
        rate=None if case.rate is None else case.rate / dp,
    )


class Clients:
    """Clients of one server, over HTTP, on one simulated device.

    Args:
        prefix: tokens that all prompts begin with.
    """

    def __init__(self, limits: EngineLimits, cost: PredictedCost, policy: str, prefix: int = 0):
        self._workload = Workload(limits.page_size)
        root = self._workload.pages.add(NEW_ROOT, 0)
        self._shared = self._workload.pages.add(root, prefix // limits.page_size)
        self._lengths: dict[int, int | None] = {}
        self._simulation = Simulation(
            self._workload,
            limits,
            POLICIES[policy](),
            device_of(cost, limits),
            lengths=self._lengths,
            scheduled=False,
        )
        self._reading = Reading(cost.profile.host)
        self._now = 0.0

    @property
    def figures(self) -> Figures:
        return self._simulation.figures

    def run(self, case: OnlineCase, group: str) -> None:
        """Send every shot at its time, or as soon as a client is free, until all are answered."""
        start = self._now + PAUSE
        ids = deque(self._add(shot, group) for shot in case.shots)
        self._workload.fill()
        if case.clients:
            for _ in range(min(case.clients, len(ids))):
                self._send(ids.popleft(), start)
        else:
            for shot in case.shots:
                self._send(ids.popleft(), start + (shot.at or 0.0))
        while (now := self._simulation.next_event) < NEVER:
            self._now = now
            for _ in self._simulation.advance():
                if ids:
                    self._send(ids.popleft(), now)

    def _add(self, shot: Shot, group: str) -> int:
        id = len(self._lengths)
        event = plain_arrival(id, self._shared, shot.num_in, shot.num_out)
        self._workload.add(event, "", self._shared, group)
        self._lengths[id] = event.max_length
        return id

    def _send(self, id: int, now: float) -> None:
        request = self._workload.requests[id]
        enters = self._reading.enters(now, request.event.num_prompt)
        request.event = msgspec.structs.replace(request.event, now=enters, arrival=now)
        self._simulation.arrive(enters, id)


def _replay(load: LoadPlan, limits: EngineLimits, cost: PredictedCost, policy: str) -> Figures:
    """The requests of a trace: they arrive when they did and generate as many tokens."""
    replayed = verify(Trace.read(str(load.trace)))
    outcomes = replayed.outcomes
    longest = max((o.length or 0 for o in outcomes.values()), default=0)
    prompts = (r.event.num_prompt + 1 for r in replayed.workload.requests.values())
    longest = max(longest, max(prompts, default=0))
    if longest > limits.max_model_len:
        raise BadRequest(
            f"{load.name} has a request of {longest:,} tokens, and the longest context that fits "
            f"is {limits.max_model_len:,}",
            param="load",
        )
    for request in replayed.workload.requests.values():
        most = min(request.event.max_length, limits.max_model_len)
        request.event = msgspec.structs.replace(request.event, max_length=most)
    return Simulation(
        replayed.workload,
        limits,
        POLICIES[policy](),
        device_of(cost, limits),
        lengths={id: outcome.length for id, outcome in outcomes.items()},
        aborts=[(o.aborted, id) for id, o in outcomes.items() if o.length is None],
    ).run()


def _prediction(name: str, figures: Figures, dp: int) -> Prediction:
    tpots = [
        (r.tokens[-1] - r.tokens[0]) / (len(r.tokens) - 1)
        for r in figures.records
        if len(r.tokens) > 1
    ]
    makespan = figures.makespan
    return Prediction(
        load=name,
        requests=dp * figures.num_requests,
        ttft_p50=percentile(figures.ttft, 50),
        ttft_p99=percentile(figures.ttft, 99),
        itl_p50=percentile(figures.itl, 50),
        itl_p99=percentile(figures.itl, 99),
        tpot_p50=percentile(tpots, 50),
        tokens_per_second=dp * figures.throughput,
        requests_per_second=dp * figures.num_requests / makespan if makespan else 0.0,
        cached_share=figures.cached_share,
        preemptions=dp * figures.num_preemptions,
        is_growing=_is_growing(np.array(figures.ttft)),
    )


def _is_growing(ttft: np.ndarray) -> bool:
    third = len(ttft) // 3
    if third == 0:
        return False
    first, last = float(np.median(ttft[:third])), float(np.median(ttft[-third:]))
    return last > LATE_SECONDS and last > GROWTH * first


class StepCost(Protocol):
    """Step times; see ``asyncllm.executor.sim.cost.SimCost``."""

    def timing(
        self,
        step: int,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_samples: int,
        decode_steps: int = 1,
    ) -> StepTiming: ...
    def copy_seconds(self, num_pages: int, page_size: int) -> float: ...


class Reading:
    """An event loop that reads one request after the other, over HTTP."""

    def __init__(self, host: HostTimes):
        self._host = host
        self._until = 0.0

    def enters(self, now: float, num_prompt: int) -> float:
        """When a request that is sent now enters the queue.

        The way back to the client is included, though it comes later, and so is what the event
        loop takes for the first token: no client can tell.
        """
        host = self._host
        reading = host.reading(num_prompt)
        self._until = max(now, self._until) + reading + host.begin
        return self._until + max(0.0, host.client - reading) + host.loop(1)


def device_of(cost: StepCost, limits: EngineLimits) -> Device:
    """A simulated device with these step times."""
    return Device(
        lambda step, rows: cost.timing(
            step, rows.starts, rows.lengths, rows.num_samples, rows.decode_steps
        ),
        lambda count: cost.copy_seconds(count, limits.page_size),
    )
