"""Errors in Ollama's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body, error_response
from asyncllm.server.ollama.schemas import OllamaError

if TYPE_CHECKING:
    from aiohttp import web


def ollama_error(error: Exception) -> bytes:
    return encode(OllamaError(error=error_body(error)["error"]["message"]))


def ollama_error_response(error: Exception) -> web.Response:
    """Ollama answers 503 when its queue is full."""
    response = error_response(error)
    if response.status == 429:
        response.set_status(503)
    response.body = ollama_error(error)
    return response
