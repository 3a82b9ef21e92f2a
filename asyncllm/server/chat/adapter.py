"""From the requests of other APIs to a chat: what their translations share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec

from asyncllm.errors import BadRequest, ContextLengthExceeded
from asyncllm.server.chat.requests import GeneratingFields
from asyncllm.server.http.parse import invalid

T = TypeVar("T", bound=msgspec.Struct)


def convert_part(given: dict[str, Any], kind: type[T], where: str) -> T:
    """Check an object that the body's Struct takes as it comes.

    Raises:
        BadRequest: it is malformed; the error names the field within ``where``.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem = invalid(error, kind)
        inside = f"{where}.{problem.param}" if problem.param else where
        raise BadRequest(f"{where}: {problem.message}", param=inside) from None


def generating_fields(body: GeneratingFields) -> dict[str, Any]:
    """The fields that a request shares with chat completions."""
    return {name: getattr(body, name) for name in GeneratingFields.__struct_fields__}


def tool_call(id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    """A call as messages of chat completions have it.

    Args:
        arguments: JSON as text, or any value of it.
    """
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@contextmanager
def renamed(
    names: Mapping[str, str], words: Literal["completion", "chat", "anthropic"] = "chat"
) -> Iterator[None]:
    """Have errors name the fields that the client sent.

    Args:
        names: from a chat's fields to the client's.
        words: the wording for a prompt that is too long.
    """
    try:
        yield
    except BadRequest as error:
        param = error.param or ""
        if (name := names.get(param)) is not None:
            if error.message.startswith(f"{param} "):
                error.message = name + error.message.removeprefix(param)
            error.param = name
        if isinstance(error, ContextLengthExceeded):
            error.reword(words)
        raise
