"""Ollama's routes about models and the server."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Final

from aiohttp import web

from asyncllm.errors import EngineDead, NotFound
from asyncllm.server.http.answer import json_response
from asyncllm.server.ollama import schemas
from asyncllm.server.ollama.reply import timestamp
from asyncllm.server.ollama.requests import OllamaOptions, OllamaShowRequest
from asyncllm.server.page.files import PAGE, wants_page
from asyncllm.server.service import SERVICE, Service
from asyncllm.types import SamplingParams
from asyncllm.types.sampling_defaults import SamplingDefaults

#: The version of Ollama whose API this is. Clients refuse to talk to one that is too old for them:
#: GitHub Copilot to less than 0.6.4. Ollama's own CLI only says so when it is not its own.
API_VERSION: Final = "0.12.11"
#: Some clients look for exactly this text.
RUNNING: Final = "Ollama is running"
#: Ollama's clients show a time this far away as "forever".
_FOREVER: Final = timedelta(days=36_525).total_seconds()
_LATEST: Final = ":latest"


def resolve_model(service: Service, body: str | None) -> str:
    """The name to answer with; naming no model means the first one.

    Raises:
        NotFound: no model of that name is served, with the tag ``latest`` or without it.
    """
    names = service.model_names
    name = body or names[0]
    if name not in names and name.removesuffix(_LATEST) not in names:
        raise NotFound(f"model '{name}' not found", param="model", code="model_not_found")
    return name


async def ollama_tags(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    modified = timestamp(service.llm.created)
    models = [
        schemas.OllamaModel(**_model(service, name), modified_at=modified)
        for name in service.model_names
    ]
    return json_response(schemas.OllamaTags(models=models))


async def ollama_processes(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    models = [
        schemas.OllamaRunning(
            **_model(service, name),
            expires_at=timestamp(service.llm.created + _FOREVER),
            size_vram=0,
            context_length=service.llm.limits.max_model_len,
        )
        for name in service.model_names
    ]
    return json_response(schemas.OllamaProcesses(models=models))


async def ollama_show(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.read(request, OllamaShowRequest)
    resolve_model(service, body.model or body.name)
    formats = llm.chat_reader.formats
    capabilities: list[schemas.Capability] = ["completion"]
    if formats.tools is not None:
        capabilities.append("tools")
    if formats.reasoning is not None:
        capabilities.append("thinking")
    family = _family(service)
    return json_response(
        schemas.OllamaShown(
            modified_at=timestamp(llm.created),
            parameters=_parameters(llm.default_params),
            details=_details(service),
            model_info={
                "general.architecture": family,
                "general.basename": llm.model_name,
                f"{family}.context_length": llm.limits.max_model_len,
                f"{family}.vocab_size": llm.limits.vocab_size,
            },
            capabilities=capabilities,
        )
    )


async def ollama_running(request: web.Request) -> web.Response:
    """Ollama's CLI sends HEAD before each command. Loading and draining are healthy.

    Browsers get the page instead.
    """
    if (page := request.app.get(PAGE)) is not None and wants_page(request):
        return page.index(request)
    if not request.app[SERVICE].llm.healthy:
        raise EngineDead("the engine has stopped")
    return web.Response(text=RUNNING)


async def ollama_version(request: web.Request) -> web.Response:
    return json_response(schemas.OllamaVersion(version=API_VERSION))


def _model(service: Service, name: str) -> dict[str, Any]:
    """Fields of a model; ``ollama list`` shows the first digits of the digest."""
    return {
        "name": name,
        "model": name,
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> schemas.OllamaDetails:
    family, llm = _family(service), service.llm
    return schemas.OllamaDetails(
        parent_model="",
        format="safetensors",
        family=family,
        families=[family],
        parameter_size="",
        quantization_level=llm.spec.weight_format or llm.limits.dtype,
    )


def _family(service: Service) -> str:
    """For example ``qwen3`` for ``Qwen3ForCausalLM``."""
    return service.llm.spec.architecture.partition("For")[0].lower()


def _parameters(defaults: SamplingParams) -> str:
    """The sampling defaults in Ollama's format."""
    known = OllamaOptions.__struct_fields__
    same = [name for name in known if name in SamplingDefaults.__struct_fields__]
    named = {name: getattr(defaults, name) for name in same}
    named["repeat_penalty"] = defaults.repetition_penalty
    return "\n".join(f"{name} {value}" for name, value in named.items())
