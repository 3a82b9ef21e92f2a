"""The server's state for operators and clients, and the traces of requests."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from asyncllm.engine.requests.history import RequestTrace
from asyncllm.errors import NotFound
from asyncllm.server.http.answer import json_response
from asyncllm.server.limits.api_keys import tenant_of
from asyncllm.server.native.schemas import Aborted, Load, Model, ModelList, NamedTrace, Version
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.trace import explain
from asyncllm.version import __version__


async def load(request: web.Request) -> web.Response:
    return json_response(Load(server_load=len(request.app[SERVICE].live)))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=__version__))


async def list_models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    return json_response(ModelList(data=[_model(service, name) for name in service.model_names]))


async def retrieve_model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    return json_response(_model(service, service.resolve_model(request.match_info["id"])))


async def request_trace(request: web.Request) -> web.Response:
    """What happened to one request."""
    service = request.app[SERVICE]
    name, served = request.match_info["id"], service.find(request)
    return trace_response(name, [] if served is None else service.traces(served))


def trace_response(name: str, traces: Sequence[tuple[int, RequestTrace]]) -> web.Response:
    """The traces of a request's choices.

    Raises:
        NotFound: there are none.
    """
    if not traces:
        raise NotFound(f"no trace of a request {name!r} is kept", param="id")
    return json_response(NamedTrace(id=name, sequences=explain(traces).sequences))


def came(request: web.Request, name: str) -> float | None:
    """When the latest request of this name came; None if there is none."""
    served = request.app[SERVICE].log.find(tenant_of(request), name)
    return None if served is None else served.came


async def abort_request(request: web.Request) -> web.Response:
    """End a request that is being served; its client gets the answer so far."""
    service = request.app[SERVICE]
    name, served = request.match_info["id"], service.find(request)
    if served is None or not service.live.abort(served):
        raise NotFound(f"no request {name!r} is being served", param="id")
    return json_response(Aborted(id=name, aborted=True))


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.llm.created,
        owned_by="asyncllm",
        root=service.llm.model_name,
        parent=None,
        max_model_len=service.llm.limits.max_model_len,
        vocab_size=service.llm.limits.vocab_size,
        quantization=service.llm.spec.weight_format,
    )
