"""Whether the text of every message is in a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from asyncllm.text.reasoning_marks import CHANNEL_ENDS, REASONING_MARKS
from asyncllm.text.template_form.messages import Message

#: Templates leave out what an answer has before these: it is reasoning.
_REASONING_ENDS: Final = (
    *(mark for _, ends, _ in REASONING_MARKS.values() for mark in ends),
    *CHANNEL_ENDS,
)


def is_lost(messages: Sequence[Message], prompt: str) -> bool:
    """Whether a text of checked messages is missing in the prompt that was made of them.

    A text may stand there as JSON, and each of its lines may be stripped or indented.
    """
    at = 0  # texts mostly come in their order
    for text in _texts(messages):
        found = prompt.find(text, at)
        if found < 0:
            found = prompt.find(text)
        if found < 0:
            found = _find_lines(text, prompt)
        if found < 0:
            return True
        at = found
    return False


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content", "")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        for text in texts:
            if message["role"] == "assistant":
                text = text[max(_end_of(mark, text) for mark in _REASONING_ENDS) :]
            if stripped := text.strip():
                yield stripped


def _end_of(mark: str, text: str) -> int:
    at = text.rfind(mark)
    return 0 if at < 0 else at + len(mark)


def _find_lines(text: str, prompt: str) -> int:
    """The place of the last line of a text, if all of them come in their order, else -1.

    Each may be written as JSON.
    """
    at = 0
    for line in map(str.strip, text.splitlines()):
        forms = (line, _as_json(line, ascii=False), _as_json(line, ascii=True))
        at = next((found for form in forms if (found := prompt.find(form, at)) >= 0), -1)
        if at < 0:
            return -1
    return at


def _as_json(text: str, *, ascii: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii)[1:-1]
