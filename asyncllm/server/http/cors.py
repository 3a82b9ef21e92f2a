"""CORS: pages of other origins may call the server if the configuration lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from asyncllm.server.limits.headers import OPENAI_HEADERS

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp.typedefs import Handler

#: Headers that scripts may read, besides those that browsers always show them.
_EXPOSED: Final = ", ".join(
    (
        *("X-Request-Id", "X-Ignored-Parameters"),
        *("Retry-After", "retry-after-ms", "x-should-retry"),
        *OPENAI_HEADERS,
    )
)
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
