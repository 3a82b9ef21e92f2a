"""Pace: how many prompt tokens a step is to have, where nobody waits for a first token."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple, Protocol

from asyncllm.engine.batch import RunningBatch
from asyncllm.engine.forecast import Forecast
from asyncllm.engine.sequence import Sequence
from asyncllm.engine.step_time import StepTimeModel
from asyncllm.engine.waiting import WaitingQueue

#: A step has so many prompt tokens or none, and as many as take so many seconds: attending to a
#: chunk, however small, takes 20 us a layer on an H200.
CHUNK, CHUNK_SECONDS = 512, 10e-3
#: So many steps may pass between two such, at most: those who come meanwhile wait for the next.
MAX_PAUSE = 16


class Pace(Protocol):
    """How fast prompts are taken."""

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """At most so many prompt tokens for a step; 0 only if there are decode rows.

        Args:
            step: its number.
            num_decodes: of its decode rows.
            waiting: who is not in the batch yet.
            batch: who is.
        """


class AtOnce:
    """As many as fit."""

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """See ``Pace.prompt_tokens``."""
        return math.inf


class Evenly:
    """No faster than it takes to end a batch as soon as it can end.

    A batch takes as many steps as its longest output has tokens. Prompts first would leave only
    decode rows to most of them, ever fewer; yet up to some hundred tokens a step takes what reading
    the weights takes. So prompts with shorter outputs, whose lengths are known, are kept to fill
    steps: each step gets its share of all tokens, prompt and output, that are left. But no prompt
    comes too late for its output to end with the longest one (earliest deadline first; the demand
    bound of Baruah, Rosier and Howell, Real-Time Systems 2, 1990).

    Qwen3 on an H200, 256 prompts and outputs of 100 to 1,024 tokens, output tokens per second:

    |      | prompts at once | every step | 512 tokens at a time | 1,024  |
    |------|-----------------|------------|----------------------|--------|
    | 8B   | 10,072 - 10,129 | 10,415     | **10,431**           |        |
    | 0.6B | 27,549 - 27,725 | 24,638     | 27,365               | 27,666 |

    Predicted were 8 % more for 8B. It is power that both ways run out of: a step with few rows
    draws less, and so runs at higher clocks. With 0.6B, steps are attention for the most part.
    """

    def __init__(self, forecast: Forecast, times: StepTimeModel):
        self._forecast = forecast
        self._times = times
        self._next = 0  # the step that is to have prompt tokens again

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """See ``Pace.prompt_tokens``. Those who cannot all run at once had better begin soon."""
        if num_decodes and step < self._next:
            return 0
        if len(waiting) > batch.num_free or not (waiting or batch.prefilling):
            return math.inf
        rate = self._rate(num_decodes, waiting, batch)
        per_token = self._times.cost.per_token
        chunk = max(CHUNK, CHUNK_SECONDS / per_token) if per_token else CHUNK
        pause = min(math.ceil(chunk / rate), MAX_PAUSE)
        self._next = step + pause
        return max(math.ceil(rate * pause), chunk)

    def _rate(self, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch) -> float:
        """Prompt tokens a step; at least one."""
        prompts = [self._work(seq, len(seq.tokens)) for seq in waiting]
        prompts += [self._work(seq, batch.remaining(seq)[1]) for seq in batch.prefilling.values()]
        decodes = [self._work(seq, 0) for seq in batch.decoding]
        steps = max(1, *(work.output for work in prompts + decodes))
        due = sorted((steps - work.output if work.certain else 0, work.prompt) for work in prompts)
        sums = accumulate(tokens for _, tokens in due)
        needed = max(tokens / (slack + 1) for tokens, (slack, _) in zip(sums, due, strict=True))
        share = sum(work.prompt + work.output for work in prompts + decodes) / steps
        return max(needed, share - num_decodes, 1.0)

    def _work(self, seq: Sequence, prompt: int) -> _Work:
        return _Work(prompt, self._forecast.length(seq) - len(seq.tokens), seq.surely_full)


class _Work(NamedTuple):
    """Tokens left of a sequence, and whether that is certain."""

    prompt: int
    output: int
    certain: bool


__all__ = ["AtOnce", "Evenly", "Pace"]
