"""From the requests of other APIs to a chat: what their translations share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec

from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import BadRequest, ContextLengthExceeded
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.requests import ChatRequest, GeneratingFields
from asyncllm.server.http.parse import invalid
from asyncllm.server.model import Model
from asyncllm.types import SamplingParams

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


async def open_chat(
    llm: Model, chat: ChatRequest, reservation: Reservation, *, logprobs: int | None = None
) -> Conversation:
    """Render and encode a chat that another API's request was translated to.

    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    params = sampling_params(
        chat, llm.default_params, max_tokens=chat.max_tokens, logprobs=logprobs
    )
    return await open_conversation(llm, chat, params, reservation)


def cut_to_fit(params: SamplingParams, prompt_ids: Sequence[int], context: int) -> SamplingParams:
    """Parameters with ``max_tokens`` cut to the room that the prompt leaves in the context.

    For APIs where asking for more is not an error. A prompt that fills the context still is one.
    """
    room = max(1, context - len(prompt_ids))
    if (params.max_tokens or 0) <= room:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


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
