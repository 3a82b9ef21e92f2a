"""Turns that a template cannot place: they are moved into others, or joined with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncllm.text.template_form.messages import Message, calls_of, text_of

#: Roles of what the author of a program says.
SYSTEM: Final = ("system", "developer")

#: How texts begin that a program adds to a user's: Claude Code's, and later system messages.
_REMINDERS: Final = ("<system-reminder>", "<system>")


def added(message: Message, text: str, *, before: bool = False, between: str = "\n\n") -> Message:
    """A copy of a message with more text."""
    texts = [text, text_of(message)] if before else [text_of(message), text]
    return {**message, "content": between.join(filter(None, texts))}


def placed_system(messages: Sequence[Message], *, at_start: bool) -> list[Message]:
    """System messages at the start become one; every later one a part of the next user turn.

    That is where it stood, so the prompt of a longer conversation begins with the same tokens.

    Args:
        at_start: the template takes a system message at the start; otherwise its text begins the
            first user turn.
    """
    start = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    head = "\n\n".join(filter(None, map(text_of, messages[:start])))
    made: list[Message] = []
    if head and at_start:
        made.append({**messages[0], "content": head})
        head = ""
    waiting = [head] if head else []
    for message in messages[start:]:
        if message["role"] in SYSTEM:
            waiting.append(f"<system>\n{text_of(message)}\n</system>")
            continue
        if waiting and message["role"] == "user":
            message = added(message, "\n\n".join(waiting), before=True)
            waiting = []
        elif waiting and message["role"] != "tool":  # results follow their calls at once
            made.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        made.append(message)
    if waiting:
        made.append({"role": "user", "content": "\n\n".join(waiting)})
    return made


def joined(messages: Sequence[Message], role: str) -> list[Message]:
    """Turns of one role in a row become one; so do their calls."""
    made: list[Message] = []
    for message in messages:
        if made and message["role"] == role == made[-1]["role"]:
            both = {**made[-1], **message, "content": made[-1].get("content", "")}
            if calls := calls_of(made[-1]) + calls_of(message):
                both["tool_calls"] = calls
            made[-1] = added(both, text_of(message))
        else:
            made.append(message)
    return made


def with_folded_users(messages: Sequence[Message], *, only_reminders: bool) -> list[Message]:
    """A user's turns after a result become its last lines.

    Args:
        only_reminders: those that a program adds, and no user has written.
    """
    made: list[Message] = []
    for message in messages:
        follows = made and message["role"] == "user" and made[-1]["role"] == "tool"
        if follows and (not only_reminders or text_of(message).startswith(_REMINDERS)):
            made[-1] = added(made[-1], text_of(message))
        else:
            made.append(message)
    return made


def with_bridges(messages: Sequence[Message]) -> list[Message]:
    """An empty answer stands between a result and a user's turn."""
    made: list[Message] = []
    for message in messages:
        if made and message["role"] == "user" and made[-1]["role"] == "tool":
            made.append({"role": "assistant", "content": ""})
        made.append(message)
    return made


def break_markers(message: Message) -> Message:
    """The text with a space in what looks like a special token, for templates that refuse these."""
    return {**message, "content": text_of(message).replace("<|", "< |")}
