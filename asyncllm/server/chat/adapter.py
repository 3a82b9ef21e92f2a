"""From the requests of other APIs to a chat: what their translations share."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from asyncllm.errors import BadRequest, ContextLengthExceeded
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.requests import GeneratingFields
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.http.parse import invalid
from asyncllm.server.streaming.delivery import Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.types import SchedulingParams

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


class OpenedChat(NamedTuple):
    """A chat that is ready to be submitted as ``job``."""

    conversation: Conversation
    job: Job


async def open_chat(
    llm: Model,
    chat: ChatRequest,
    scheduling: SchedulingParams,
    reservation: Reservation,
    *,
    logprobs: int | None = None,
) -> OpenedChat:
    """Render, encode and prepare a chat.

    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    params = sampling_params(
        chat, llm.default_params, max_tokens=chat.max_tokens, logprobs=logprobs
    )
    conversation = await open_conversation(llm, chat, params, reservation)
    prompts = [conversation.prompt_ids]
    [job] = await fan_out(llm, prompts, 1, conversation.params, scheduling, chat)
    return OpenedChat(conversation, job)


def cut_to_fit(job: Job, context: int) -> Job:
    """The same job, with ``max_tokens`` cut to the room that the context has left.

    For APIs where asking for more is not an error. A prompt that fills the context still is one.
    """
    room = max(1, context - len(job.prompt_ids))
    if (job.params.max_tokens or 0) <= room:
        return job
    return job._replace(params=msgspec.structs.replace(job.params, max_tokens=room))


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
