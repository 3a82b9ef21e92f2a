"""The chat behind every route that says the same in other words than chat completions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from asyncllm.errors import BadRequest, ContextLengthExceeded
from asyncllm.server.chat.conversation import Conversation, open_conversation
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.streaming.delivery import Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncllm.engine.requests.reservations import Reservation
    from asyncllm.server.chat.requests import ChatRequest
    from asyncllm.server.model import Model
    from asyncllm.types import SchedulingParams


class OpenedChat(NamedTuple):
    """How the answer is to be read, and what to submit for it."""

    conversation: Conversation
    job: Job


async def open_chat(
    llm: Model,
    asked: ChatRequest,
    scheduling: SchedulingParams,
    reservation: Reservation,
    *,
    logprobs: int | None = None,
) -> OpenedChat:
    """Render, encode and prepare the chat that a request comes down to.

    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    params = sampling_params(
        asked, llm.default_params, max_tokens=asked.max_tokens, logprobs=logprobs
    )
    conversation = await open_conversation(llm, asked, params, reservation)
    prompts = [conversation.prompt_ids]
    [job] = await fan_out(llm, prompts, 1, conversation.params, scheduling, asked)
    return OpenedChat(conversation, job)


def cut_to_fit(job: Job, context: int) -> Job:
    """The same job, with no more ``max_tokens`` than the context has room for.

    For the APIs where asking for more is no error. A prompt that leaves no room stays one.
    """
    room = max(1, context - len(job.prompt_ids))
    if (job.params.max_tokens or 0) <= room:
        return job
    return job._replace(params=msgspec.structs.replace(job.params, max_tokens=room))


@contextmanager
def renamed(
    names: Mapping[str, str], words: Literal["completion", "chat", "anthropic"] = "chat"
) -> Iterator[None]:
    """Errors within speak of what the client sent.

    Args:
        names: what the client calls a chat's fields.
        words: how it is told of a prompt that is too long.
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
