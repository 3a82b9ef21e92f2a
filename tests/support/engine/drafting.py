"""Drafts for tests: guesses at random, or changed answers; all of them are tried."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import pytest

from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.speculation.learned import LearnedSpeculation
from asyncllm.types import SamplingParams


class Guesses:
    """Some of ``likely``, or nothing."""

    kind = "guesses"
    prior = 0.5

    def __init__(self, chance: random.Random, likely: Seq[int]):
        self._chance = chance
        self._likely = likely

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        count = self._chance.randint(0, most)
        return [self._chance.choice(self._likely) for _ in range(count)]


def draft_for(seq: Sequence, chance: random.Random, likely: Seq[int]) -> Sequence:
    """Have the next tokens of a sequence guessed."""
    seq.drafting = Drafting([Guesses(chance, likely)])
    seq.drafting._records["guesses"].failed = lambda length: None  # type: ignore[method-assign]
    return seq


def try_all(sched: Scheduler, monkeypatch: pytest.MonkeyPatch | None = None) -> Scheduler:
    """Have everything tried that is drafted and fits a step, whether it pays or not."""
    speculation: Any = sched._speculation
    patch = monkeypatch.setattr if monkeypatch else setattr
    chance = random.Random(sched.limits.num_pages)
    patch(speculation, "_best", partial(best, sched.limits.max_num_batched_tokens, chance))
    patch(speculation, "_keeps_out", lambda batch, num_waiting: False)
    return sched


def best(
    most: int, chance: random.Random, wanting: Seq[Any], shape: Any, *_: Any, in_flight: bool
) -> tuple[list[int], bool]:
    """``LearnedSpeculation._best`` that verifies all that fits, and sometimes waits before."""
    counts: list[int] = []
    for each in wanting:
        counts.append(max(0, min(len(each.found.tokens), most - shape.num_tokens - sum(counts))))
    return counts, in_flight and len(wanting) == shape.num_tokens and chance.random() < 0.3


class Mutated:
    """Drafts an answer that is known, with some tokens changed, or with a part left out."""

    kind = "mutated"
    prior = 0.5

    def __init__(self, answer: Seq[int], num_prompt: int, chance: random.Random, vocab_size: int):
        self._answer = list(answer)
        self._num_prompt = num_prompt
        self._chance = chance
        self._vocab_size = vocab_size
        self._quality = chance.choice((0.0, 0.5, 0.9, 1.0))

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        chance, done = self._chance, len(tokens) - self._num_prompt
        if chance.random() < 0.2:
            return ()
        draft = self._answer[done : done + chance.randint(1, most)]
        return [
            token if chance.random() < self._quality else chance.randrange(self._vocab_size)
            for token in draft
        ]


def draft_answers(
    engine: Any, answers: Mapping[int, Seq[int]], monkeypatch: pytest.MonkeyPatch, seed: int = 0
) -> list[int]:
    """Have known answers drafted, and all drafts tried, also beside prompts.

    Args:
        answers: tokens by the seeds of requests; nothing is drafted for others.

    Returns:
        How many tokens of each draft were right, as they are verified.
    """
    chance, counts, verified = random.Random(seed), [], LearnedSpeculation.verified

    def drafting(num_prompt: int, params: SamplingParams) -> Drafting | None:
        if params.seed is None or params.seed not in answers:
            return None
        vocab_size = engine.limits.vocab_size
        return Drafting([Mutated(answers[params.seed], num_prompt, chance, vocab_size)])

    def count(self: Any, draft: Any, num_right: int) -> None:
        counts.append(num_right)
        verified(self, draft, num_right)

    monkeypatch.setattr(engine, "_drafting", drafting)
    most = engine.limits.max_num_seqs
    monkeypatch.setattr(LearnedSpeculation, "_best", partial(best, most, chance))
    monkeypatch.setattr(LearnedSpeculation, "_keeps_out", lambda *_: False)
    monkeypatch.setattr(LearnedSpeculation, "verified", count)
    monkeypatch.setattr("asyncllm.engine.drafts.drafting.FIRST_PAUSE", 0)
    return counts
