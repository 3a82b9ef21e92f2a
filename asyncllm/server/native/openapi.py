"""GET /openapi.json: what the routes take and answer, as OpenAPI 3.1, made from their Structs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

from asyncllm.config.server_config import ServerConfig
from asyncllm.server.chat.requests import COMPONENTS, REFERRED
from asyncllm.server.http.answer import json_response
from asyncllm.server.http.route import EVENT_STREAM, Route
from asyncllm.version import __version__

PATH: Final = "/openapi.json"

_REFS: Final = COMPONENTS + "{name}"
_PATTERN: Final = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_STREAM: Final = (
    "With `stream`, instead of the whole answer. An `error` says why it goes no further, and "
    "`[DONE]` is always the last event."
)


class Description:
    """Describes one application's routes."""

    def __init__(self, routes: Sequence[Route], config: ServerConfig, *, needs_key: bool):
        self._routes = routes
        self._strict = config.strict
        self._needs_key = needs_key

    async def serve(self, request: web.Request) -> web.Response:
        # A host application may have mounted us anywhere.
        prefix = request.path.removesuffix(PATH)
        return json_response({**self.document, "servers": [{"url": prefix or "/"}]})

    @cached_property
    def document(self) -> dict[str, Any]:
        """The whole document, without the server's address."""
        refs, schemas = self._schemas()
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            path = _PATTERN.sub(r"{\1}", route.path)
            operation = self._operation(route, refs)
            paths.setdefault(path, {})[route.method.lower()] = operation
        components: dict[str, Any] = {"schemas": schemas, "headers": _HEADERS}
        if self._needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "asyncllm", "version": __version__},
            "paths": paths,
            "components": components,
        }

    def _schemas(self) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
        """References to the Structs that routes take or answer, and the schemas of all of them."""
        bodies = [route.body for route in self._routes if route.body is not None]
        answers = [kind for route in self._routes for kind in route.answers]
        events = [route.event for route in self._routes if route.event is not None]
        errors = [route.error for route in self._routes]
        referred = [*REFERRED, *(kind for route in self._routes for kind in route.refers)]
        kinds = list(dict.fromkeys([*bodies, *answers, *events, *referred, *errors]))
        found, schemas = msgspec.json.schema_components(kinds, ref_template=_REFS)
        if self._strict:
            _, of_bodies = msgspec.json.schema_components(bodies, ref_template=_REFS)
            for name in of_bodies:
                if schemas[name].get("type") == "object":
                    schemas[name]["additionalProperties"] = False
        return dict(zip(kinds, found, strict=True)), schemas

    def _operation(self, route: Route, refs: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": route.handler.__name__,
            "summary": route.summary,
            "responses": {"200": _success(route, refs)},
        }
        if parameters := _parameters(route):
            operation["parameters"] = parameters
        if route.body is not None:
            content = {"application/json": {"schema": refs[route.body]}}
            operation["requestBody"] = {"required": True, "content": content}
        closed = self._needs_key and route.needs_key
        if closed:
            operation["security"] = [{"key": []}]
        for status in sorted((*route.refusals, *((401,) if closed else ()))):
            operation["responses"][str(status)] = _refusal(status, refs[route.error])
        return operation


_HEADERS: Final[dict[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's own X-Request-Id, or one that was made up for it.",
        "schema": {"type": "string"},
    },
    "X-Ignored-Parameters": {
        "description": "Fields of the body that had no effect, such as unknown ones.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which the request may be accepted.",
        "schema": {"type": "integer"},
    },
}


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _success(route: Route, refs: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    headers = ["X-Request-Id"]
    content: dict[str, Any] = {}
    match [refs[kind] for kind in route.answers]:
        case []:
            content["text/plain"] = {"schema": {"type": "string"}}
        case [only]:
            content["application/json"] = {"schema": only}
        case several:
            content["application/json"] = {"schema": {"anyOf": several}}
    if route.event is not None:
        content[route.stream_type] = {"schema": _event(route, refs)}
    if route.body is not None:
        headers.append("X-Ignored-Parameters")
    return {"description": "Success", "headers": _headers(*headers), "content": content}


def _event(route: Route, refs: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """The schema of each event of a stream, as in OpenAPI 3.2; 3.1 leaves it open."""
    content = {"anyOf": [refs[route.event], refs[route.error]]}
    if route.stream_type != EVENT_STREAM:
        return content
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": content,
    }
    if route.named_events:
        properties = {"event": {"type": "string"}, "data": data}
    else:
        properties = {"data": {"anyOf": [data, {"const": "[DONE]"}], "description": _STREAM}}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _refusal(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    retry = ["Retry-After"] if status in (429, 503) else []
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _headers("X-Request-Id", *retry),
        "content": {"application/json": {"schema": schema}},
    }


def _parameters(route: Route) -> list[dict[str, Any]]:
    """The parameters of the path and of the query; the first value listed is the default."""
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PATTERN.findall(route.path)
    ]
    in_query = [
        {
            "name": name,
            "in": "query",
            "schema": given
            if isinstance(given, dict)
            else {"enum": list(given), "default": given[0]},
        }
        for name, given in route.query.items()
    ]
    return in_path + in_query
