"""Web pages that call the server: those of other origins may if the configuration lists them.

A browser sends its user's requests from any page that is open in it. An API key stops the others,
which do not know it. Without keys, three rules do, see ``guard``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from asyncllm.server.http.errors import HttpError
from asyncllm.server.http.route import BY_HANDLER
from asyncllm.server.limits.accounts import OPENAI_HEADERS
from asyncllm.supervise.front.hosts import Hosts, name_of

#: Headers that scripts may read, besides those that browsers always show them.
_EXPOSED: Final = ", ".join(
    (
        *("X-Request-Id", "X-Ignored-Parameters"),
        *("Retry-After", "retry-after-ms", "x-should-retry"),
        *OPENAI_HEADERS,
    )
)
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
#: Seconds for which browsers keep the answer to a preflight; Chromium's own limit.
_MAX_AGE: Final = "7200"


def add_cors(app: web.Application, origins: Collection[str]) -> None:
    """Let pages of ``origins`` read this app's answers; ``*`` stands for every page.

    Keys are headers that scripts set themselves, not cookies, so credentials are never allowed.
    """
    everybody = "*" in origins

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        # A signal and not a middleware, which would be too late for streams.
        origin = request.headers.get(hdrs.ORIGIN)
        if not everybody:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if origin is not None and (everybody or origin in origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if everybody else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    app.on_response_prepare.append(allow)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight, which has no API key.

    The header that ``add_cors`` adds to this answer tells whether the origin is allowed.
    """
    method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    if request.method != hdrs.METH_OPTIONS or method is None:
        return await handler(request)
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*")
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted,
        hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE,
    }
    return web.Response(status=204, headers=headers)


def guard(hosts: Hosts, origins: Collection[str]) -> Middleware:
    """A middleware for a server without keys, which any web page could use otherwise.

    A page whose own name leads to this server (DNS rebinding) is recognised by the name. Another
    one cannot read answers, but forms and some requests of scripts arrive all the same: what would
    change something is refused. And a body of JSON has to say so, which has browsers ask before.

    Programs that are no browsers send none of the headers that this is about.

    Args:
        hosts: names that the server has.
        origins: of pages that may use it; "*" stands for any.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        for host in request.headers.getall(hdrs.HOST, ()):
            _check_host(host, hosts)
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS):
            _check_origin(request, origins)
            _check_type(request)
        return await handler(request)

    return check


def _check_host(host: str, known: Hosts) -> None:
    """
    Raises:
        HttpError: a stranger may own this name.
    """
    if host in known:
        return
    name = name_of(host)
    advice = f": if it is one of its names, start it with --allowed-hosts {name}" if name else ""
    raise HttpError(
        f"this server needs no API key, so it does not answer to the host {host!r}{advice}",
        403,
        code="host_not_allowed",
    )


def _check_origin(request: web.Request, origins: Collection[str]) -> None:
    """
    Raises:
        HttpError: a page of another origin sends the request, and may not.
    """
    given = request.headers.getall(hdrs.ORIGIN, [])
    site = request.headers.get("Sec-Fetch-Site", "").lower()
    if site in ("same-origin", "none") or "*" in origins or not (given or site):
        return
    host = request.headers.get(hdrs.HOST, "")
    if given and all(one in origins for one in given):
        return
    if not site and all(_is_same(one, host) for one in given):
        return
    who = repr(given[0]) if given else "other origins"
    named = given[0] if given and given[0] != "null" else "'*'"
    raise HttpError(
        f"this server needs no API key, so pages of {who} may not use it, unless it is started "
        f"with --cors-origin {named}",
        403,
        code="origin_not_allowed",
    )


def _is_same(origin: str, host: str) -> bool:
    """Whether pages of this origin come from this host; a proxy may speak HTTPS before us."""
    scheme, _, name = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and name.removesuffix(port) == host.lower().removesuffix(port)


def _check_type(request: web.Request) -> None:
    """
    Raises:
        HttpError: a page sends a body that is to be JSON, and does not say that it is.
    """
    route = request.app[BY_HANDLER].get(request.match_info.handler)
    if route is None or route.body is None or hdrs.ORIGIN not in request.headers:
        return
    kind = request.content_type.lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(
            f"the Content-Type of a page's request must be application/json, not {kind!r}",
            415,
            code="content_type_not_json",
        )
