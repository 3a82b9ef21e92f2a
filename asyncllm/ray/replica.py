"""Replica: a model and its HTTP API in an actor of Ray's."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import msgspec
import ray
from ray import serve
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncllm.errors import EngineDead
from asyncllm.executor.team.station import run_station
from asyncllm.executor.team.station_messages import Machines
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.server.arrivals.routed import LOST
from asyncllm.server.embedded.exchange import InProcess, ask
from asyncllm.server.observe.log_format import configure_logging
from asyncllm.supervise.front.answers import Answer, of_headers
from asyncllm.supervise.front.request import MOST_REPLICAS
from asyncllm.supervise.signals import DEAD
from asyncllm.wire.tcp import TOKEN_BYTES, listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ray.actor import ActorHandle
    from ray.serve.config import AutoscalingContext

    from asyncllm.config import EngineConfig
    from asyncllm.config.server_config import ServerConfig
    from asyncllm.server.embedded.exchange import Headers

log = logging.getLogger(__name__)

#: How long streams have to write why they fail, when the engine has died.
_LAST_FRAMES_SECONDS = 1.0


class Replica:
    """Serves requests as ``asyncllm serve`` does, on an in-memory connection to the same server.

    It is rank 0 of its model. If that has several machines, it starts what starts the ranks there.

    When the engine dies, so does the actor's process, and Ray Serve starts another replica.
    """

    # Ray Serve awaits it, on the event loop that methods run on.
    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, server: ServerConfig, machines: int
    ) -> None:
        configure_logging(server)
        found, self._stations = await start_stations(server) if machines > 1 else (None, [])
        self._llm = AsyncLLM(config=engine, machines=found)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._number = context.rank.rank % MOST_REPLICAS
        self._server = InProcess(self._llm, server, self._number, is_guarded=True)
        await self._llm.start()
        sys.setswitchinterval(1e-4)  # as in asyncllm/server/run.py
        self._ending = asyncio.create_task(self._end_with_engine())
        if self._stations:
            # Ray Serve awaits it before it ends the actors, in any order. Python looks for it in
            # the class alone.
            self.__del__ = self._close

    async def answer(self, request: Request) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """First the status and the headers of the answer, then the parts of its body.

        Raises:
            EngineDead: another replica should answer.
        """
        exchange = await self._server.open(request.peer)
        with exchange:
            try:
                status, headers = await ask(
                    exchange, request.method, request.target, request.headers, _parts(request.body)
                )
            except h11.LocalProtocolError as error:  # the proxy accepts what HTTP/1.1 forbids
                yield 400, [(b"content-type", b"text/plain; charset=utf-8")]
                yield str(error).encode()
                return
            if status == 503 and not self._llm.healthy:
                raise EngineDead(LOST.message)
            yield status, headers
            async for part in exchange.body():
                yield part

    async def whole_answer(self, request: Request) -> tuple[str, Answer]:
        """This replica's name, and its answer to what all are asked."""
        parts = self.answer(request)
        status, headers = cast("tuple[int, Headers]", await anext(parts))
        body = b"".join([cast("bytes", part) async for part in parts])
        return self._name, of_headers(status, headers, body)

    async def check_health(self) -> None:
        """
        Raises:
            EngineDead: no request can be served.
        """
        if not self._llm.healthy:
            raise EngineDead("the engine has died")

    async def record_replica_metadata(self) -> dict[str, int]:
        """What ``PrefixRouter`` knows it by."""
        return {NUMBER: self._number}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``desired_replicas`` decides by."""
        stats, most = self._llm.stats, self._llm.limits.max_num_seqs
        return {LOAD: load(stats.running, stats.waiting + self._llm.num_reserved, most)}

    async def _close(self) -> None:
        """End the ranks on all machines."""
        self._ending.cancel()
        await self._llm.aclose()

    async def _end_with_engine(self) -> None:
        cause = await self._llm.stopped()
        log.error("the engine died: %s", cause)
        await asyncio.sleep(_LAST_FRAMES_SECONDS)
        os._exit(DEAD)


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    yield body


class Station:
    """An actor that is the station of its machine; Ray ends it with the replica, its owner."""

    def __init__(self, token: bytes, server: ServerConfig) -> None:
        configure_logging(server)
        self._token = token
        self._host = get_node_ip_address()
        self._listening = listen(self._host)

    def address(self) -> tuple[str, int]:
        """Where rank 0 finds it."""
        return self._host, self._listening.getsockname()[1]

    def run(self) -> None:
        """See ``run_station``."""
        run_station(self._listening, self._token)


async def start_stations(server: ServerConfig) -> tuple[Machines, list[ActorHandle]]:
    """Start a station in each bundle of this actor's placement group but the first, its own.

    Returns:
        Where they wait for rank 0, and the actors, which end with their handles.
    """
    group, token = get_current_placement_group(), secrets.token_bytes(TOKEN_BYTES)
    assert group is not None, "a replica on several machines has a placement group"
    actor = ray.remote(Station)
    stations = []
    for number, bundle in enumerate(group.bundle_specs[1:], 1):
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        started = actor.options(scheduling_strategy=placed, **options)
        stations.append(started.remote(token, server))
    addresses = await asyncio.gather(*(station.address.remote() for station in stations))
    for station in stations:
        station.run.remote()
    return Machines(get_node_ip_address(), tuple(map(tuple, addresses)), token), stations


#: The load that replicas should have. What is left is for requests that come while another starts.
TARGET: Final = 0.8
#: What replicas report their load as.
LOAD: Final = "load"


def load(running: int, waiting: int, max_num_seqs: int) -> float:
    """How full an engine is: 1 when it can run no more, and more when requests wait.

    While requests wait, the engine runs as many as it can: fewer than ``max_num_seqs`` when the KV
    cache is full.
    """
    most = max(1, running) if waiting else max_num_seqs
    return (running + waiting) / most


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy of Ray Serve's, which itself keeps the limits and waits for the delays."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return context.target_num_replicas, {}
    # Replicas that have not reported yet are as full as the others.
    mean = sum(loads.values()) / len(loads)
    return mean * context.current_num_replicas / TARGET, {}


#: What a replica's metadata has it as.
NUMBER: Final = "number"


class Request(msgspec.Struct, frozen=True):
    """An HTTP request as a whole.

    Attributes:
        target: path and query, as in a request line.
        path: as the client means it, without the query.
        peer: the client's host and port, as far as they are known.
        home: the number of the replica that has what it names, if one has.
    """

    method: bytes
    target: bytes
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    peer: tuple[str, int] | None
    home: int | None = None
