"""What surrounds every handler: request ids, errors in the client's shape, API keys."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import AsyncLLMError, EngineDead, NotReady
from asyncllm.server.http.errors import ErrorWriter, HttpError, error_response
from asyncllm.server.http.half_close import PROBE
from asyncllm.server.http.route import BY_HANDLER
from asyncllm.server.http.traffic import TRAFFIC
from asyncllm.server.limits.api_keys import ApiKeys, tenant_of
from asyncllm.supervise.crowd import PROBES, Use
from asyncllm.system.suggest import suggest_path

log = logging.getLogger(__name__)

#: The id of the request that the current task serves.
request_id: ContextVar[str] = ContextVar("request_id")
#: Its tenant; empty when the server has no keys, or none was needed.
request_tenant: ContextVar[str] = ContextVar("request_tenant", default="")
#: The fields of that request that were ignored, as a header's value.
ignored_fields: ContextVar[str] = ContextVar("ignored_fields")

#: When a request's head had arrived, by ``time.perf_counter``.
ARRIVED: Final = web.RequestKey("asyncllm_arrived", float)
#: Why a request failed; for the log.
FAILURE: Final = web.RequestKey("asyncllm_failure", Exception)
#: The request's places in the engine's queue, reserved when its body has arrived.
RESERVATION: Final = web.RequestKey("asyncllm_reservation", Reservation)

#: Writes the errors of paths without a handler, by the path that they begin with.
ERROR_ROOTS: Final = web.AppKey("asyncllm_error_roots", dict[str, ErrorWriter])
#: The paths of all routes without parameters.
PATHS: Final = web.AppKey("asyncllm_paths", Collection[str])
#: A route, and its path in our own application: a host's may have a prefix before it.
KNOWN_ROUTE: Final = web.AppKey("asyncllm_known_route", tuple[web.AbstractRoute, str])

#: The Server header; aiohttp would send its version, and Python's.
SERVER: Final = "asyncllm"

_ACCEPTED_ID = re.compile(r"[\x21-\x7e]{1,128}")


#: Gives the connection of a request away that the engine took with it; False if it must be answered
#: here.
HAND_OVER: Final = web.AppKey[Callable[[web.Request], bool]]("asyncllm_hand_over")


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """An ``on_response_prepare`` signal: it reaches streams too, whose headers leave early."""
    response.headers[hdrs.SERVER] = SERVER
    # A host application may answer a request of ours itself: then there is no id.
    if given := request_id.get(None):
        response.headers["X-Request-Id"] = given
    if ignored := ignored_fields.get(None):
        response.headers["X-Ignored-Parameters"] = ignored


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error that is raised before the first byte becomes an error body.

    However a request ends, its places in the queue are free and its client is no longer probed.
    """
    request[ARRIVED] = time.perf_counter()
    request_tenant.set("")
    write = _error_writer(request)
    given = request.headers.get("X-Request-Id", "")
    request_id.set(given if _ACCEPTED_ID.fullmatch(given) else new_request_id())
    traffic = request.app[TRAFFIC]
    try:
        with traffic.unanswered.until_answered():
            _refuse_in_crowd(request)
            return await handler(request)
    except AsyncLLMError as error:
        response = _refused(request, error, write)
    except asyncio.CancelledError:
        ended_by = traffic.unanswered.ended_by
        if ended_by is None or request.writer.output_size > 0:
            raise
        response = _refused(request, ended_by, write)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        traffic.refusals.count(error)
        response = from_http(request, error, write, request.app[PATHS])
    except ConnectionError as error:
        request[FAILURE] = _bare(error)
        return web.Response()  # the client is gone: aiohttp finds nobody to send this to
    except Exception as error:
        log.exception("request %s failed", request_id.get())
        response = write(error)
    finally:
        request.pop(PROBE, None)  # the answer itself is written next
        if (reservation := request.get(RESERVATION)) is not None:
            reservation.release()
    if not request.content.is_eof():
        response.force_close()  # the rest of the body must not be taken for the next request
    return response


def _refused(request: web.Request, error: AsyncLLMError, write: ErrorWriter) -> web.Response:
    request[FAILURE] = _bare(error)
    hand_over = request.app.get(HAND_OVER)
    if hand_over is not None and isinstance(error, EngineDead) and hand_over(request):
        return web.Response()  # the next server answers; this one has no connection any more
    request.app[TRAFFIC].refusals.count(error)
    response = write(error)
    if isinstance(error, EngineDead | NotReady):
        response.force_close()  # the process is about to end, and the next one answers elsewhere
    return response


def _refuse_in_crowd(request: web.Request) -> None:
    """
    Raises:
        Crowded: the request is no probe, and there are too many connections for any other.
    """
    # A host application's connections are none of ours.
    if getattr(request.protocol, "use", None) is Use.PROBING and request.path not in PROBES:
        raise request.app[TRAFFIC].crowd.refusal()


def _bare(error: Exception) -> Exception:
    """The error without its traceback, whose frames hold the request and its body.

    The request keeps its error, so they would stay until the garbage collector finds the cycle:
    gigabytes, where many large bodies are refused.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def new_request_id() -> str:
    return uuid.uuid4().hex


def _error_writer(request: web.Request) -> ErrorWriter:
    """Writes errors as the client of this path expects them, also where we have no such route."""
    known = request.app[BY_HANDLER].get(request.match_info.handler)
    if known is not None:
        return known.write_error
    route, path = request.app[KNOWN_ROUTE]
    assert route.resource is not None
    prefix = route.resource.canonical.removesuffix(path)
    ours = request.path.removeprefix(prefix) + "/"
    writers = request.app[ERROR_ROOTS].items()
    return next((write for root, write in writers if ours.startswith(root + "/")), error_response)


def from_http(
    request: web.BaseRequest,
    error: web.HTTPException,
    write: ErrorWriter = error_response,
    paths: Collection[str] = (),
) -> web.Response:
    """aiohttp's own refusals as an error body: no such route, wrong method, and others.

    Args:
        paths: those that there are; the nearest is named if there is no such route.
    """
    allowed = error.headers.get(hdrs.ALLOW)
    if allowed is not None and request.method == hdrs.METH_OPTIONS:
        return web.Response(status=204, headers={hdrs.ALLOW: f"{allowed},OPTIONS"})
    reason = {404: "unknown route", 405: "method not allowed"}.get(error.status, error.reason)
    advice = ""
    if error.status == 404:
        advice = suggest_path(request.path, paths)
    elif allowed is not None:
        advice = f"; allowed: {allowed}"
    response = write(HttpError(f"{reason}: {request.method} {request.path}{advice}", error.status))
    if allowed is not None:
        response.headers[hdrs.ALLOW] = allowed
    return response


def require_key(keys: ApiKeys, exempt: Collection[Handler]) -> Middleware:
    """A middleware that admits only tenants of ``keys``, except to ``exempt``."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in exempt:
            keys.admit(request)
            request_tenant.set(tenant_of(request))
        return await handler(request)

    return check
