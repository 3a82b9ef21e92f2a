"""Heads whose drafts are mostly right, as a random one never is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM
from asyncllm.executor.step.drafter import HeadDrafter
from tests.support.engine.drafting import draft_answers


class KnownAnswers:
    """Has the head draft answers that are known, with some tokens changed; its own are computed.

    Args:
        answers: tokens of prompt and answer.
    """

    def __init__(self, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch, seed: int):
        self._answers = answers
        self._chance = random.Random(seed)
        self._draft = HeadDrafter.draft
        monkeypatch.setattr(HeadDrafter, "draft", lambda *args: self.draft(*args))

    def draft(self, drafter: HeadDrafter, step: Any, *args: Any) -> None:
        self._draft(drafter, step, *args)
        right, count = args[-2:]
        table = drafter._table
        following, drafted = table.next_position.tolist(), table.drafted.tolist()
        verified = [] if right is None else right[0].tolist()
        for row in dict.fromkeys(step.sampling.tolist()):
            slot, start, q_len = step.rows[row].tolist()
            end = following[slot] if row in verified else start + q_len
            known = table._known[slot].tolist()
            for answer in self._answers:
                if answer[: len(known)] == known:
                    for place, token in enumerate(answer[end + 1 : end + 1 + count]):
                        is_right = self._chance.random() < 0.8
                        drafted[slot][place] = token if is_right else self._chance.randrange(300)
        table.drafted.copy_(torch.tensor(drafted))


def always_draft(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many tokens of each draft were right, as they are verified."""
    engine: Any = llm._own.engine
    drafting = engine._drafting
    counts = draft_answers(engine, {}, monkeypatch)
    monkeypatch.setattr(engine, "_drafting", drafting)
    return counts
