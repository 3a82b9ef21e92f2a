"""Stations in a replica's placement group: one actor on each machine but the replica's own."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncllm.executor.team.machines import Machines
from asyncllm.executor.team.station import run_station
from asyncllm.server.observe.log_format import configure_logging
from asyncllm.wire.tcp import TOKEN_BYTES, listen

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from asyncllm.config.server_config import ServerConfig


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
