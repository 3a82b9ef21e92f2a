"""Pace: how many prompt tokens each step of a batch computes, where TTFT does not matter."""

from __future__ import annotations

import heapq
import math
from itertools import accumulate
from typing import NamedTuple, Protocol

from asyncllm.config import EngineLimits
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.engine.scheduling.waiting.queue import WaitingQueue

#: A step has at least this many prompt tokens, and as many as take this long, or none: prefill
#: attention costs at least 20 us a layer on an H200, however small the chunk.
CHUNK, CHUNK_SECONDS = 512, 10e-3
#: Steps between two decisions whether prompts begin.
PAUSE = 4
#: Requests that arrive within this many steps of each other are a batch.
GAP = 16
#: Up to this many rows, a decode step takes as long as with one.
FEW_ROWS = 16
#: The share of all pages that a batch may take; the rest is for rows that grow.
PAGES_SHARE = 0.9


class Pace(Protocol):
    """How fast prompts are taken."""

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """The most prompt tokens for step number ``step``; 0 only if there are decode rows."""


class GreedyPace:
    """As many as fit."""

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """See ``Pace.prompt_tokens``."""
        return math.inf


class EvenPace:
    """Finishes a batch as early as possible with as few rows at once as possible.

    A batch takes at least as many steps as its longest output has tokens. With all prompts first,
    the first steps have many rows and most steps few; but each row costs more, the more there are.
    So prompts wait while the present rows suffice: while all outputs end in time if the longest
    waiting one begins whenever a row ends (list scheduling, longest first; Graham, SIAM Journal on
    Applied Mathematics 17, 1969). Otherwise prompts are taken early enough for each output to end
    with the longest one (earliest deadline first; the demand bound of Baruah, Rosier and Howell,
    Real-Time Systems 2, 1990).

    Prompts are taken at once if an output may end before its last token, if there are not slots and
    pages for the whole batch, or if a request has come later than the batch.

    On an H200, 256 prompts and outputs of 100 to 1,024 tokens: 11,020 output tokens per second with
    Qwen3-8B, 10,472 with prompts at once, 10,750 with equally many tokens in each step; with 0.6B
    29,700, 28,909 and 29,490.
    """

    def __init__(self, limits: EngineLimits, forecast: Forecast, times: StepTimeModel):
        self._limits = limits
        self._forecast = forecast
        self._times = times
        self._next = 0  # the step that may have prompt tokens again
        self._newest = -1  # the batch's newest request, and the step at which it was seen first
        self._joined = 0

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """See ``Pace.prompt_tokens``."""
        if num_decodes and step < self._next:
            return 0
        if len(waiting) > batch.num_free:
            self._joined = step  # requests that wait for a slot belong to the batch
            return math.inf
        begun = batch.prefilling.values()
        if self._has_later(step, num_decodes, waiting) or not (waiting or begun):
            return math.inf
        prompts = [self._work(seq, len(seq.tokens)) for seq in waiting]
        prompts += [self._work(seq, batch.remaining(seq)[1]) for seq in begun]
        rows = [self._work(seq, 0) for seq in batch.decoding]
        works = prompts + rows
        if not (all(work.certain for work in works) and self._fit(works)):
            return math.inf
        steps = max(work.output for work in works)
        demand = _demand(prompts, steps)
        # The prompt tokens due before the next decision must fit in one step.
        is_early = demand * PAUSE <= self._limits.max_num_batched_tokens
        if num_decodes > FEW_ROWS and is_early and _suffice(rows, prompts, steps):
            self._next = step + PAUSE
            return 0
        per_token = self._times.cost.per_token
        chunk = max(CHUNK, CHUNK_SECONDS / per_token) if per_token else CHUNK
        return math.ceil(max(demand, chunk))

    def _has_later(self, step: int, num_decodes: int, waiting: WaitingQueue) -> bool:
        """Whether a waiting request came after the batch."""
        newest = max((seq.id for seq in waiting), default=-1)
        if newest > self._newest and (not num_decodes or step - self._joined <= GAP):
            self._newest, self._joined = newest, step
        return newest > self._newest

    def _fit(self, works: list[_Work]) -> bool:
        """Whether there are pages for all of them at once."""
        page_size = self._limits.page_size
        pages = sum(-(-work.length // page_size) for work in works)
        return pages <= PAGES_SHARE * self._limits.num_pages

    def _work(self, seq: Sequence, prompt: int) -> _Work:
        length = self._forecast.length(seq)
        return _Work(prompt, length - len(seq.tokens), length, seq.output.surely_full)


class _Work(NamedTuple):
    """A sequence's remaining prompt and output tokens, its final length, and if that is certain."""

    prompt: int
    output: int
    length: int
    certain: bool


def _suffice(rows: list[_Work], prompts: list[_Work], steps: int) -> bool:
    """Whether all outputs end within ``steps`` steps with no more rows than now."""
    ends = [row.output for row in rows]
    heapq.heapify(ends)
    for output in sorted((work.output for work in prompts), reverse=True):
        end = ends[0] + PAUSE + output
        if end > steps:
            return False
        heapq.heapreplace(ends, end)
    return True


def _demand(prompts: list[_Work], steps: int) -> float:
    """Prompt tokens per step with which every output can end within ``steps`` steps."""
    due = sorted((steps - work.output, work.prompt) for work in prompts)
    sums = accumulate(tokens for _, tokens in due)
    return max(tokens / (slack + 1) for tokens, (slack, _) in zip(sums, due, strict=True))
