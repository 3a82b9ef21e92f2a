"""The chat behind every route that says the same in other words than chat completions."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.errors import BadRequest
from asyncllm.server.conversation import Conversation, open_conversation
from asyncllm.server.sampling import Job, fan_out, sampling_params
from asyncllm.server.scheduling import scheduling_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncllm.api import AsyncLLM
    from asyncllm.server.protocol import ChatRequest


class OpenedChat(NamedTuple):
    """How the answer is to be read, and what to submit for it."""

    conversation: Conversation
    job: Job


async def open_chat(
    llm: AsyncLLM, asked: ChatRequest, tenant: str, *, logprobs: int | None = None
) -> OpenedChat:
    """Render, encode and prepare the chat that a request comes down to.

    Raises:
        QueueFull, BadRequest: as in ``chat_completions``.
    """
    params = sampling_params(
        asked, llm.default_params, max_tokens=asked.max_tokens, logprobs=logprobs
    )
    scheduling = scheduling_params(asked, tenant)
    conversation = await open_conversation(llm, asked, params, tenant)
    prompts = [conversation.prompt_ids]
    [job] = await fan_out(llm, prompts, 1, conversation.params, scheduling, asked)
    return OpenedChat(conversation, job)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within name fields as the client does; ``names`` are those of a chat's fields."""
    try:
        yield
    except BadRequest as error:
        error.param = names.get(error.param or "", error.param)
        raise
