"""Drafts for tests: guesses at random, all of which are tried."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Seq
from typing import Any

from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence


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


def try_all(sched: Scheduler) -> Scheduler:
    """Have everything tried that is drafted and fits a step, whether it pays or not."""

    def best(found: Any, shape: Any, start: int, spare: int, *_: Any, alone: bool) -> int:
        return max(0, min(len(found.tokens), spare))

    speculation: Any = sched._speculation
    speculation._best = best
    speculation._keeps_out = lambda batch, num_waiting: False
    speculation._most_rows = sched.limits.max_num_batched_tokens
    return sched
