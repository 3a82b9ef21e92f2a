"""What surrounds every handler: request ids, errors in OpenAI's shape, API keys."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING

from aiohttp import web

from asyncllm.errors import AsyncLLMError
from asyncllm.server.errors import error_response

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp.typedefs import Handler, Middleware

    from asyncllm.server.api_keys import ApiKeys

log = logging.getLogger(__name__)

#: The id of the request that the current task serves.
request_id: ContextVar[str] = ContextVar("request_id")

_ACCEPTED_ID = re.compile(r"[\x21-\x7e]{1,128}")


class _Refused(AsyncLLMError):
    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
        self.type = "invalid_request_error" if status < 500 else "server_error"


async def set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: it reaches streams too, whose headers leave early."""
    # A host application may answer a request of ours itself: then there is no id.
    if given := request_id.get(None):
        response.headers["X-Request-Id"] = given


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that is raised before the first byte becomes OpenAI's error body."""
    given = request.headers.get("X-Request-Id", "")
    request_id.set(given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex)
    try:
        return await handler(request)
    except AsyncLLMError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _from_http(request, error)
    except ConnectionError:
        return web.Response()  # the client is gone: aiohttp finds nobody to send this to
    except Exception as error:
        log.exception("request %s failed", request_id.get())
        return error_response(error)


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: no such route, wrong method, and what else it may find."""
    reason = {404: "unknown route", 405: "method not allowed"}.get(error.status, error.reason)
    what = f"{reason}: {request.method} {request.path}".encode("utf-8", "replace").decode()
    response = error_response(_Refused(what, error.status))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def require_key(keys: ApiKeys, exempt: Collection[Handler]) -> Middleware:
    """A middleware that lets only tenants of ``keys`` through, except to ``exempt``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in exempt:
            keys.tenant_of(request)
        return await handler(request)

    return check
