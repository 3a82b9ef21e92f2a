"""OpenAI's error body, for responses and for frames in mid-stream; and refusals, counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from aiohttp import web

from asyncllm.errors import AsyncLLMError, DeadlineExceeded, QueueFull, RateLimited, Unauthorized
from asyncllm.server.http.answer import Answer, json_response

ErrorWriter: TypeAlias = Callable[[Exception], web.Response]

#: Seconds after which a client may try again, unless the error has a better estimate.
RETRY_SECONDS = 1.0

#: Messages and params may quote what the client sent, which can be millions of characters.
_MAX_MESSAGE = 2000
_MAX_PARAM = 200


class HttpError(AsyncLLMError):
    """A request that breaks the rules of HTTP: unknown route, incomplete body, malformed header."""

    def __init__(self, message: str, status: int, *, code: str | None = None):
        super().__init__(message, code=code)
        self.status = status
        self.type = "invalid_request_error" if status < 500 else "server_error"


class ErrorDetail(Answer, kw_only=True):
    """``param`` names the field of the request; programs may decide by ``code``."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer, kw_only=True):
    """Every answer with a status of 400 or above, and the last event of a stream that failed."""

    error: ErrorDetail


def known_error(error: Exception) -> AsyncLLMError:
    """What the client gets; of an unexpected error it learns nothing about our code."""
    return error if isinstance(error, AsyncLLMError) else AsyncLLMError("internal server error")


def error_text(error: Exception) -> str:
    return _plain(known_error(error).message, _MAX_MESSAGE)


def error_body(error: Exception) -> dict[str, Any]:
    """``{"error": {...}}``, see ``ErrorBody``."""
    known = known_error(error)
    return {
        "error": {
            "message": error_text(error),
            "type": known.type,
            "param": None if known.param is None else _plain(known.param, _MAX_PARAM),
            "code": known.code,
        }
    }


def _plain(text: str, most: int) -> str:
    """At most ``most`` characters, without lone surrogates, which JSON cannot encode."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return short.encode("utf-8", "replace").decode()


def error_response(error: Exception) -> web.Response:
    """An error body as a response, with the headers that tell clients when to retry."""
    status = known_error(error).status
    headers = {}
    if status in (429, 503):
        wait = RETRY_SECONDS
        if isinstance(error, QueueFull | RateLimited):
            wait = error.retry_after
        headers["Retry-After"] = str(math.ceil(wait))
        headers["retry-after-ms"] = str(math.ceil(wait * 1000))
        headers["x-should-retry"] = "true"
    if isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"  # OpenAI's clients would try a 408 again
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status=status, headers=headers)


#: By the error's code, then by its status; None for what the engine's own counters have.
_CAUSE_BY_CODE: Final = {
    "context_length_exceeded": "infeasible",
    "deadline_exceeded": "deadline",
    "not_ready": "not_ready",
    "engine_dead": "engine_dead",
    "step_failed": None,
    "policy_failed": None,
    "constraint_failed": None,
}
_CAUSE_BY_STATUS: Final = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "not_found",
    408: "slow_body",
    413: "too_large",
    429: "rate",
    503: "busy",
}
#: Any other refusal.
_OTHER_CAUSE: Final = "other"


class Refusals:
    """How many requests got an error instead of a place in the engine, by cause.

    The causes are these few, whatever clients send.
    """

    def __init__(self) -> None:
        causes = [
            *("queue_requests", "queue_tokens", "queue_share", _OTHER_CAUSE),
            *filter(None, _CAUSE_BY_CODE.values()),
            *_CAUSE_BY_STATUS.values(),
        ]
        self.counts: Counter[str] = Counter(dict.fromkeys(causes, 0))

    def count(self, error: Exception) -> None:
        """A request was answered with this error."""
        if isinstance(error, QueueFull):
            cause: str | None = f"queue_{error.cause}"
        elif isinstance(error, AsyncLLMError) and error.code in _CAUSE_BY_CODE:
            cause = _CAUSE_BY_CODE[error.code]
        else:
            status = getattr(error, "status", 500)
            cause = _CAUSE_BY_STATUS.get(status, _OTHER_CAUSE)
        if cause is not None:
            self.counts[cause if cause in self.counts else _OTHER_CAUSE] += 1
