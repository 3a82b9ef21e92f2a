"""Many replicas in simulated time: their real schedulers and caches, and the router before them.

Replicas die and start again. As the server's front does it, a request of a dead replica moves to
another one, once, if its answer has not begun; otherwise its client gets an error and asks again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final, Literal

import msgspec
import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import POLICIES
from asyncllm.executor.sim.profile import HostTimes
from asyncllm.lab.planning.chats import TOKEN_BYTES, Chat, ChatLoad, Turn, make_chats
from asyncllm.lab.planning.predict import Reading, StepCost, device_of
from asyncllm.lab.replay.figures import Record, percentile
from asyncllm.lab.replay.simulate import NEVER, Simulation
from asyncllm.lab.replay.workload import Workload
from asyncllm.supervise.front.router import Placed, Router, blocks

Routing = Literal["affinity", "least", "random"]
#: Seconds after which a client asks again whose answer broke off, or whom nobody could serve.
RETRY_SECONDS: Final = 1.0


class AnyReplica(Router):
    """Routes at random, for comparison."""

    def __init__(self, num_replicas: int, seed: int):
        super().__init__(num_replicas)
        self._draw = random.Random(seed)

    def place(self, blocks: Sequence[int], num_bytes: int, among: Collection[int]) -> Placed:
        return Placed(self._draw.choice(sorted(among)), 0.0)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas.

    Attributes:
        routing: "affinity" is the router of the server; "least" is the same router, to which no
            two prompts begin alike; "random" takes any replica.
        restart_seconds: from the death of a replica until it serves again, with an empty cache.
    """

    replicas: int
    limits: EngineLimits
    cost: StepCost
    host: HostTimes
    policy: str = "fair"
    routing: Routing = "affinity"
    restart_seconds: float = 15.0

    def serve(
        self,
        load: ChatLoad,
        deaths: Sequence[tuple[float, int]] = (),
        ended: Callable[[int], None] = lambda _: None,
    ) -> FleetFigures:
        """Serve all chats to their ends.

        Args:
            deaths: times, and the replica that dies then.
            ended: told how many turns have been answered, now and then.
        """
        return _Run(self, load).serve(deaths, ended)


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds.

    Attributes:
        found, findable: shares of the prompt tokens, in the replicas' caches, and in one without
            end that all share.
        token_imbalance: tokens that the busiest replica computed, to the mean, of those that never
            died.
        request_imbalance: the same of the requests that a replica has when one arrives somewhere.
        moved: requests that another replica answered, after a death.
        broken: errors that clients got.
    """

    chats: int
    requests: int
    seconds: float
    found: float
    findable: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    tokens_per_second: float
    token_imbalance: float
    request_imbalance: float
    deaths: int
    moved: int
    broken: int


class _Request(msgspec.Struct, eq=False):
    """A turn that waits for its answer.

    Attributes:
        sent: when its client sent it; for the last time, if an answer broke off.
        blocks: see ``Router.place``.
    """

    chat: Chat
    number: int
    sent: float
    blocks: Sequence[int]
    placed: Placed | None = None
    has_moved: bool = False

    @property
    def turn(self) -> Turn:
        return self.chat.turns[self.number]


class _Replica:
    """A server; ``requests`` by id are those it has been given, ``computed`` its tokens."""

    def __init__(self, fleet: Fleet, workload: Workload, lengths: dict[int, int | None]):
        device = device_of(fleet.cost, fleet.limits)
        self.simulation = Simulation(
            workload,
            fleet.limits,
            POLICIES[fleet.policy](),
            device,
            lengths=lengths,
            scheduled=False,
        )
        self.reading = Reading(fleet.host)
        self.requests: dict[int, _Request] = {}

    def has_begun(self, id: int) -> bool:
        """Whether the answer has."""
        live = self.simulation.live.get(id)
        return live is not None and len(live.record.tokens) > 0


class _Run:
    """One run of a fleet: the events of clients and replicas, in order of time."""

    def __init__(self, fleet: Fleet, load: ChatLoad):
        self._fleet = fleet
        self._workload = Workload(fleet.limits.page_size)
        self._chats = make_chats(load, self._workload, fleet.limits.page_size)
        turns = [turn for chat in self._chats for turn in chat.turns]
        self._turns = turns
        self._lengths: dict[int, int | None] = {
            turn.id: turn.num_prompt + turn.num_answer for turn in turns
        }
        self._replicas: list[_Replica | None] = [self._start() for _ in range(fleet.replicas)]
        self._router = Router(fleet.replicas)
        if fleet.routing == "random":
            self._router = AnyReplica(fleet.replicas, load.seed)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        # (time, replica); stale if the replica's next event is at another time.
        self._next: list[tuple[float, int]] = []
        self._dead: set[int] = set()
        self._records: list[Record] = []
        self._computed = np.zeros(fleet.replicas)
        self._busy = np.zeros(fleet.replicas)
        self._moved = self._broken = self._deaths = 0

    def serve(
        self, deaths: Sequence[tuple[float, int]], ended: Callable[[int], None]
    ) -> FleetFigures:
        for chat in self._chats:
            self._at(chat.begins, partial(self._ask, chat, 0))
        for at, index in deaths:
            self._at(at, partial(self._die, index))
        now = 0.0
        while len(self._records) < len(self._turns):
            if not self._next or (self._events and self._events[0][0] <= self._next[0][0]):
                now, _, act = heappop(self._events)
                act(now)
                continue
            now, index = heappop(self._next)
            replica = self._replicas[index]
            if replica is not None and replica.simulation.next_event == now:
                for record in replica.simulation.advance():
                    self._answered(index, record, now)
                    ended(len(self._records))
                self._note(index)
        return self._figures(now)

    def _start(self) -> _Replica:
        return _Replica(self._fleet, self._workload, self._lengths)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._order), act))

    def _note(self, index: int) -> None:
        replica = self._replicas[index]
        if replica is not None and (time := replica.simulation.next_event) < NEVER:
            heappush(self._next, (time, index))

    def _ask(self, chat: Chat, number: int, now: float) -> None:
        turn = chat.turns[number]
        known = blocks(chat.text[: TOKEN_BYTES * turn.num_prompt])
        if self._fleet.routing == "least":
            known = [hash((turn.id, now, block)) for block in known]  # like nobody's
        self._place(_Request(chat, number, now, known), now)

    def _place(self, request: _Request, now: float) -> None:
        among = [i for i, replica in enumerate(self._replicas) if replica is not None]
        if not among:
            self._at(now + RETRY_SECONDS, partial(self._place, request))
            return
        self._busy += [0 if r is None else len(r.requests) for r in self._replicas]
        turn = request.turn
        placed = self._router.place(request.blocks, TOKEN_BYTES * turn.num_prompt, among)
        request.placed, replica = placed, self._replicas[placed.replica]
        assert replica is not None
        enters = replica.reading.enters(now, turn.num_prompt)
        recorded = self._workload.requests[turn.id]
        recorded.event = msgspec.structs.replace(recorded.event, now=enters, arrival=request.sent)
        replica.requests[turn.id] = request
        replica.simulation.arrive(enters, turn.id)
        self._note(placed.replica)

    def _answered(self, index: int, record: Record, now: float) -> None:
        replica = self._replicas[index]
        assert replica is not None
        request = replica.requests.pop(record.id)
        assert request.placed is not None
        self._router.ended(request.placed)
        self._records.append(record)
        self._computed[index] += record.num_prefilled + len(record.tokens)
        chat, number = request.chat, request.number + 1
        if number < len(chat.turns):
            self._at(now + request.turn.think, partial(self._ask, chat, number))

    def _die(self, index: int, now: float) -> None:
        replica = self._replicas[index]
        if replica is None:
            return
        self._deaths += 1
        self._dead.add(index)
        self._replicas[index] = None
        self._router.forget(index)
        for id, request in replica.requests.items():
            assert request.placed is not None
            self._router.ended(request.placed)
            if replica.has_begun(id) or request.has_moved:
                self._broken += 1
                retry = partial(self._ask, request.chat, request.number)
                self._at(now + RETRY_SECONDS, retry)
            else:
                self._moved += 1
                request.has_moved = True
                self._place(request, now)
        self._at(now + self._fleet.restart_seconds, partial(self._restart, index))

    def _restart(self, index: int, _now: float) -> None:
        self._replicas[index] = self._start()

    def _figures(self, now: float) -> FleetFigures:
        records = self._records
        prompts = sum(record.num_prompt for record in records)
        generated = sum(len(record.tokens) for record in records)
        gaps = [np.diff(record.tokens) for record in records if len(record.tokens) > 1]
        ttft = array("d", [record.tokens[0] - record.arrival for record in records])
        itl = np.concatenate(gaps) if gaps else np.empty(0)
        steady = [i for i in range(self._fleet.replicas) if i not in self._dead]
        return FleetFigures(
            chats=len(self._chats),
            requests=len(records),
            seconds=now,
            found=sum(record.num_cached for record in records) / prompts,
            findable=sum(turn.num_cached for turn in self._turns) / prompts,
            ttft_p50=percentile(ttft, 50),
            ttft_p99=percentile(ttft, 99),
            itl_p50=percentile(itl, 50),
            itl_p99=percentile(itl, 99),
            tokens_per_second=generated / now,
            token_imbalance=_imbalance(self._computed[steady or slice(None)]),
            request_imbalance=_imbalance(self._busy[steady or slice(None)]),
            deaths=self._deaths,
            moved=self._moved,
            broken=self._broken,
        )


def _imbalance(amounts: np.ndarray) -> float:
    """The largest to the mean; 1.0 if all are 0."""
    mean = float(amounts.mean())
    return float(amounts.max()) / mean if mean else 1.0
