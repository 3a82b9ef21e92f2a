"""Whether the server is alive, from the progress of its steps, and whether it takes requests."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from asyncllm.errors import EngineDead
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.errors import error_response
from asyncllm.server.native.schemas import Health, Status
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.watchdog import WATCHDOG


async def health(request: web.Request) -> web.Response:
    """200 while loading, busy, compiling and draining; 503 once stalled or dead.

    It reads a few numbers of this process; the device is not asked.
    """
    found = health_of(request.app[SERVICE], request.app[WATCHDOG].stall)
    if found.status not in ("stalled", "dead"):
        return json_response(found)
    response = error_response(EngineDead(request.app[WATCHDOG].stall or "the engine has stopped"))
    assert isinstance(response.body, bytes)
    body = msgspec.json.decode(response.body)
    response.body = msgspec.json.encode({**msgspec.to_builtins(found), **body})
    return response


async def ping(request: web.Request) -> web.Response:
    return await health(request)


async def ready(request: web.Request) -> web.Response:
    """Whether a load balancer should send requests here."""
    request.app[SERVICE].check_ready()
    return json_response(Status(status="ready"))


def health_of(service: Service, stall: str | None) -> Health:
    """The server's state now; ``stall`` is what the watchdog has noticed."""
    llm = service.llm
    vitals = llm.vitals
    found = Health(status="ok")
    if vitals is not None:
        now, heartbeat = time.monotonic(), vitals.heartbeat
        operation = heartbeat.operation
        found.steps_done = heartbeat.num_done
        if heartbeat.done_at is not None:
            found.last_step_age = _age(now, heartbeat.done_at)
        if heartbeat.in_flight:
            oldest = heartbeat.in_flight[0]
            found.step, found.step_age = oldest.step, _age(now, oldest.since)
        found.operation, found.operation_age = operation.name, _age(now, operation.since)
        found.running, found.waiting = llm.stats.running, llm.stats.waiting
    if stall is not None:
        found.status = "stalled"
    elif not llm.healthy:
        found.status = "dead"
    elif not llm.ready:
        found.status = "loading"
    elif service.draining:
        found.status = "draining"
    elif found.step is None and not found.running and not found.waiting:
        found.status = "idle"
    return found


def _age(now: float, since: float) -> float:
    return round(now - since, 3)
