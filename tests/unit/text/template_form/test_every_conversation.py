"""Whatever clients send, every family's template renders it, and no text is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from tests.support.text.conversations import (
    FAMILIES,
    TOOLS,
    Conversation,
    conversations,
    template_of,
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(conversation=conversations(), tools=TOOLS)
def test_every_text_is_in_the_prompt(name: str, conversation: Conversation, tools: Any) -> None:
    prompt = template_of(name).render(conversation.messages, tools=tools)
    words = [*conversation.words, *conversation.called]
    assert not [word for word in words if word not in prompt]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(conversation=conversations(reasons=False), tools=TOOLS)
def test_the_next_prompt_begins_as_the_last_one(
    name: str, conversation: Conversation, tools: Any
) -> None:
    """What was said stays where it is when the conversation goes on: it is found in the cache."""
    answers = [turn[0]["role"] == "assistant" for turn in conversation.turns]
    requests = [
        Conversation(conversation.turns[:end])
        for end, (is_answer, follows) in enumerate(pairwise([*answers, True]), 1)
        if follows and not is_answer
    ]
    for before, after in pairwise(requests):
        first, second = (template_of(name).render(c.messages, tools=tools) for c in (before, after))
        same = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first)
        )
        assert not [word for word in before.words if word not in first[:same]], (first, second)
