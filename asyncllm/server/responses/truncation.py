"""``truncation: auto``: a conversation without the turns that do not fit into the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm.server.chat.adapter import OpenedChat

    Messages = list[dict[str, Any]]

#: Roles of messages that are kept where they begin the conversation.
_STAYING: Final = ("system", "developer")


async def open_fitting(
    messages: Messages,
    open_with: Callable[[Messages], Awaitable[OpenedChat]],
    context: int,
) -> OpenedChat:
    """Open the conversation without its earliest turns: as few of them as it takes.

    System messages at the beginning stay. A turn begins with a user's message.

    Args:
        context: tokens of prompt and answer together.

    Raises:
        BadRequest: not even the last turn fits.
    """
    roles = [message["role"] for message in messages]
    head = next((i for i, role in enumerate(roles) if role not in _STAYING), len(roles))
    turns = [i for i, role in enumerate(roles) if role == "user" and i > head]
    starts = [head, *turns]

    async def fits(start: int) -> OpenedChat | None:
        try:
            opened = await open_with([*messages[:head], *messages[start:]])
        except BadRequest as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        room = context - len(opened.conversation.prompt_ids)
        return opened if room >= (opened.job.params.max_tokens or 1) else None

    if (opened := await fits(head)) is not None:
        return opened
    low, high = 1, len(starts)
    found = None
    while low < high:
        middle = (low + high) // 2
        if (opened := await fits(starts[middle])) is not None:
            found, high = opened, middle
        else:
            low = middle + 1
    # The engine says what is wrong with a turn that is too long by itself.
    return found or await open_with([*messages[:head], *messages[starts[-1] :]])
