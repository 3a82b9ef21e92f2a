"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncllm.errors import AsyncLLMError
from asyncllm.server.anthropic.schemas import AnthropicError, AnthropicErrorDetail
from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body, error_response
from asyncllm.server.http.middleware import request_id

if TYPE_CHECKING:
    from aiohttp import web

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: Exception) -> AnthropicError:
    status = error.status if isinstance(error, AsyncLLMError) else 500
    other = "invalid_request_error" if status < 500 else "api_error"
    message = error_body(error)["error"]["message"]
    detail = AnthropicErrorDetail(type=_TYPES.get(status, other), message=message)
    return AnthropicError(error=detail, request_id=request_id.get())


def anthropic_error_response(error: Exception) -> web.Response:
    response = error_response(error)
    response.body = encode(anthropic_error(error))
    return response
