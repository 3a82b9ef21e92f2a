"""The HTTP API as an aiohttp application."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from asyncllm.errors import BadRequest
from asyncllm.server.anthropic import routes as anthropic_routes
from asyncllm.server.anthropic.reply import anthropic_error_response
from asyncllm.server.arrivals.names import NUMBERS, Numbers
from asyncllm.server.http.browsers import add_cors, answer_preflights
from asyncllm.server.http.middleware import (
    ERROR_ROOTS,
    KNOWN_ROUTE,
    PATHS,
    answer_errors,
    require_key,
    set_headers,
)
from asyncllm.server.http.route import BY_HANDLER
from asyncllm.server.http.slow_clients import SlowClients
from asyncllm.server.http.traffic import TRAFFIC, Traffic
from asyncllm.server.limits.accounts import add_headers
from asyncllm.server.metrics.server import add_metrics, metrics
from asyncllm.server.native import routes as native_routes
from asyncllm.server.native.live import add_live
from asyncllm.server.native.openapi import PATH, Description
from asyncllm.server.observe.access_log import log_request, observe_requests
from asyncllm.server.ollama import routes as ollama_routes
from asyncllm.server.ollama.reply import ollama_error_response
from asyncllm.server.openai import routes as openai_routes
from asyncllm.server.page.files import PAGE, Page
from asyncllm.server.reload import add_reloader, routes_for
from asyncllm.server.responses import routes as responses_routes
from asyncllm.server.service import SERVICE, Service
from asyncllm.server.streaming.write_times import WRITE_TIMES, WriteTimes
from asyncllm.server.watchdog import add_watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.typedefs import Handler, Middleware

    from asyncllm.config.server_config import ServerConfig
    from asyncllm.server.http.errors import ErrorWriter
    from asyncllm.server.http.route import Route
    from asyncllm.server.limits.api_keys import Key
    from asyncllm.server.model import Model
    from asyncllm.server.observe.spans import Spans

ROUTES: Final = (
    *openai_routes.ROUTES,
    *responses_routes.ROUTES,
    *anthropic_routes.ROUTES,
    *ollama_routes.ROUTES,
    *native_routes.ROUTES,
    *native_routes.PAGE_ROUTES,
)

#: Paths that begin with these get errors in a shape of their own.
ROOTS: Final[dict[str, ErrorWriter]] = {
    anthropic_routes.ROOT: anthropic_error_response,
    ollama_routes.ROOT: ollama_error_response,
}


def create_app(
    llm: Model, config: ServerConfig, keys: Sequence[Key] | None = None
) -> web.Application:
    """All routes, for ``serve`` or for ``add_subapp`` of a host application.

    Starting and closing the model stays with the caller; until it is ready, requests get 503.

    Args:
        keys: the API keys; those of ``config`` and its file by default.

    Raises:
        OSError, BadRequest: the file of API keys cannot be read, or is empty; the folder of crash
            reports cannot be written to; or nothing that could send spans is installed.
    """
    service = Service(llm, config, keys)
    page = Page() if config.page else None
    routes: Sequence[Route] = (*ROUTES, *routes_for(config))
    if page is None:
        routes = [route for route in routes if route not in native_routes.PAGE_ROUTES]
    if config.metrics_keyless:
        routes = _without_key(routes, metrics)
    middlewares: list[Middleware] = [answer_errors]
    observers = [log_request] if config.log_requests else []
    spans = None if config.otlp_endpoint is None else _send_spans(config.otlp_endpoint)
    if spans is not None:
        observers.append(spans.observe)
    if observers:
        middlewares.insert(0, observe_requests(partial(llm.trace, steps=False), observers))
    if config.cors_origin:
        middlewares.append(answer_preflights)
    if service.keys:
        unguarded = [route.handler for route in routes if not route.needs_key]
        if page is not None:
            # The live view also opens to the admin key, which is no API key.
            live = [route.handler for route in native_routes.PAGE_ROUTES]
            unguarded += [page.file, *live]
        middlewares.append(require_key(service.keys, exempt=unguarded))
    app = web.Application(middlewares=middlewares)
    app[SERVICE] = service
    if spans is not None:
        app.on_cleanup.append(lambda _: spans.aclose())
    app[TRAFFIC] = Traffic(slow_clients=SlowClients(config.max_unsent_bytes))
    app[NUMBERS] = Numbers()
    app[WRITE_TIMES] = WriteTimes()
    app.on_response_prepare.append(set_headers)
    if config.cors_origin:
        add_cors(app, config.cors_origin)
    add_metrics(app)
    add_watchdog(app)
    add_reloader(app, service, config)
    responses_routes.add_responses(app)
    anthropic_routes.add_header(app)
    add_headers(app, anthropic_routes.HANDLERS)
    app[BY_HANDLER] = {route.handler: route for route in routes}
    app[ERROR_ROOTS] = ROOTS
    app[PATHS] = frozenset(route.path for route in routes if "{" not in route.path)
    if page is not None:
        add_live(app)
        app[PAGE] = page
        app.router.add_get("/page/{name}", page.file)
    for route in routes:
        if route.method == "GET":
            app.router.add_get(route.path, route.handler)  # and HEAD
        else:
            app.router.add_route(route.method, route.path, route.handler)
    description = Description(routes, config, needs_key=bool(service.keys))
    app[KNOWN_ROUTE] = app.router.add_get(PATH, description.serve), PATH
    return app


def _without_key(routes: Sequence[Route], handler: Handler) -> tuple[Route, ...]:
    """The routes, one of which needs no key."""
    return tuple(
        replace(route, needs_key=False) if route.handler is handler else route for route in routes
    )


def _send_spans(endpoint: str) -> Spans:
    """
    Raises:
        BadRequest: the extra is not installed.
    """
    try:
        from asyncllm.server.observe.spans import Spans
    except ImportError as error:
        message = f"otlp_endpoint needs asyncllm-server[otel]: {error}"
        raise BadRequest(message, param="otlp_endpoint") from error
    return Spans.to(endpoint)
