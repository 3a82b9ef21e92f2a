"""What operators and clients ask about the server itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm import __version__
from asyncllm.errors import EngineDead
from asyncllm.server.errors import json_response
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from aiohttp import web


async def health(request: web.Request) -> web.Response:
    """Alive: loading and draining are healthy, a dead engine is not."""
    if not request.app[SERVICE].llm.healthy:
        raise EngineDead("the engine has stopped")
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Whether a load balancer should send requests here."""
    request.app[SERVICE].check_ready()
    return json_response({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def list_models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    data = [_model(service, name) for name in service.model_names]
    return json_response({"object": "list", "data": data})


async def retrieve_model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    return json_response(_model(service, service.resolve_model(request.match_info["id"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.llm.created,
        "owned_by": "asyncllm",
        "root": service.llm.model_name,
        "parent": None,
        "max_model_len": service.llm.limits.max_model_len,
    }
