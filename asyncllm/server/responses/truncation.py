"""``truncation: auto``: drops the earliest turns that do not fit into the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm.server.chat.adapter import OpenedChat

    Messages = list[dict[str, Any]]

#: Messages of these roles at the beginning are kept.
_STAYING: Final = ("system", "developer")


async def open_fitting(
    messages: Messages,
    open_with: Callable[[Messages], Awaitable[OpenedChat]],
    context: int,
) -> OpenedChat:
    """Open the conversation without the fewest possible of its earliest turns.

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
    # The last turn alone is too long: the error is the engine's.
    return found or await open_with([*messages[:head], *messages[starts[-1] :]])
