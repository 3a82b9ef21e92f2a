"""Errors as Ollama's clients read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.server.http.answer import encode
from asyncllm.server.http.errors import error_body, error_response

if TYPE_CHECKING:
    from aiohttp import web


def ollama_error(error: Exception) -> bytes:
    """Ollama's error body: the message and nothing else."""
    return encode({"error": error_body(error)["error"]["message"]})


def ollama_error_response(error: Exception) -> web.Response:
    """The same as a response; a full queue is 503 at Ollama."""
    response = error_response(error)
    if response.status == 429:
        response.set_status(503)
    response.body = ollama_error(error)
    return response
