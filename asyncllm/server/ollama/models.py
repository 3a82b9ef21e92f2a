"""What Ollama's clients ask about models and the server."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from asyncllm.errors import EngineDead, NotFound
from asyncllm.server.http.answer import json_response
from asyncllm.server.ollama.reply import timestamp
from asyncllm.server.ollama.requests import OllamaShowRequest
from asyncllm.server.service import SERVICE, Service

if TYPE_CHECKING:
    from asyncllm.types import SamplingParams

#: The version of Ollama whose API this is. Clients refuse to talk to one that is too old for them:
#: GitHub Copilot to less than 0.6.4. Ollama's own CLI only says so when it is not its own.
API_VERSION: Final = "0.12.11"
#: What some clients look for, word by word.
RUNNING: Final = "Ollama is running"
#: Ollama's clients take what is so far away for "forever".
_FOREVER: Final = timedelta(days=36_525).total_seconds()
_LATEST: Final = ":latest"


def resolve_model(service: Service, asked: str | None) -> str:
    """The name to answer with; naming no model means the first one.

    Raises:
        NotFound: no model of that name is served, with the tag ``latest`` or without it.
    """
    names = service.model_names
    name = asked or names[0]
    if name not in names and name.removesuffix(_LATEST) not in names:
        raise NotFound(f"model '{name}' not found", param="model", code="model_not_found")
    return name


async def ollama_tags(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    modified = timestamp(service.llm.created)
    models = [{**_model(service, name), "modified_at": modified} for name in service.model_names]
    return json_response({"models": models})


async def ollama_processes(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_ready()
    loaded = {
        "expires_at": timestamp(service.llm.created + _FOREVER),
        "size_vram": 0,
        "context_length": service.llm.limits.max_model_len,
    }
    models = [{**_model(service, name), **loaded} for name in service.model_names]
    return json_response({"models": models})


async def ollama_show(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.read(request, OllamaShowRequest)
    resolve_model(service, asked.model or asked.name)
    formats = llm.chat_reader.formats
    can = {
        "completion": True,
        "tools": formats.tools is not None,
        "thinking": formats.reasoning is not None,
    }
    family = _family(service)
    return json_response(
        {
            "modified_at": timestamp(llm.created),
            "parameters": _parameters(llm.default_params),
            "details": _details(service),
            "model_info": {
                "general.architecture": family,
                "general.basename": llm.model_name,
                f"{family}.context_length": llm.limits.max_model_len,
                f"{family}.vocab_size": llm.limits.vocab_size,
            },
            "capabilities": [capability for capability, has in can.items() if has],
        }
    )


async def ollama_running(request: web.Request) -> web.Response:
    """Asked with HEAD by Ollama's CLI before each command; loading and draining are no trouble."""
    if not request.app[SERVICE].llm.healthy:
        raise EngineDead("the engine has stopped")
    return web.Response(text=RUNNING)


async def ollama_version(request: web.Request) -> web.Response:
    return json_response({"version": API_VERSION})


def _model(service: Service, name: str) -> dict[str, Any]:
    """What is known of a model; ``ollama list`` shows the first digits of the digest."""
    return {
        "name": name,
        "model": name,
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    family = _family(service)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": service.llm.limits.dtype,
    }


def _family(service: Service) -> str:
    """``Qwen3ForCausalLM`` is a qwen3."""
    return service.llm.spec.architecture.partition("For")[0].lower()


def _parameters(defaults: SamplingParams) -> str:
    """The defaults as Ollama writes them."""
    named = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return "\n".join(f"{name} {value}" for name, value in named.items())
