"""Prompts: text, token ids or chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

from asyncllm.errors import BadRequest

#: A prompt as callers may give it: text, token ids, or chat messages.
Prompt: TypeAlias = str | Sequence[int] | Sequence[dict[str, Any]]


def plain_prompt(prompt: Prompt) -> str | list[int] | list[dict[str, Any]]:
    """A prompt as plain text, token ids or messages; arrays and tensors become lists.

    Raises:
        BadRequest: it is none of the three.
    """
    if isinstance(prompt, str):
        return prompt
    tolist = getattr(prompt, "tolist", None)
    items: Any = tolist() if tolist else list(prompt) if _is_list(prompt) else None
    if not isinstance(items, list):
        raise _no_prompt(type(prompt).__name__)
    types = set(map(type, items))  # in C: a prompt can be long
    for kind in (int, dict):
        if all(issubclass(found, kind) for found in types):
            return items
    raise _no_prompt(f"a list of {', '.join(sorted(found.__name__ for found in types))}")


def is_single(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether it is one prompt, not a list of prompts. An array of numbers is one prompt.

    Raises:
        BadRequest: it is neither.
    """
    if isinstance(prompts, str):
        return True
    if not _is_list(prompts):
        raise _no_prompt(type(prompts).__name__)
    first = next(iter(prompts), None)
    is_number = isinstance(first, int) or getattr(first, "ndim", None) == 0
    return isinstance(first, dict) or (is_number and not isinstance(first, str))


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[dict[str, Any]]]:
    """Whether a prompt is chat messages."""
    return not isinstance(prompt, str) and isinstance(next(iter(prompt), None), dict)


def is_chat(prompt: str | list[int] | list[dict[str, Any]]) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a plain prompt is chat messages."""
    return is_conversation(prompt)


def _is_list(value: object) -> bool:
    """Whether it is a list, a tuple, an array or the like; bytes are neither text nor token ids."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return False
    return isinstance(value, Sequence) or hasattr(value, "tolist")


def _no_prompt(given: str) -> BadRequest:
    return BadRequest(
        f"a prompt is text, a list of token ids, or a list of chat messages, not {given}",
        param="prompt",
    )
