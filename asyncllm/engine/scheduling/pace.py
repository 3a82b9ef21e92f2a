"""Pace: how many prompt tokens a step is to have, where nobody waits for a first token."""

from __future__ import annotations

import heapq
import math
from itertools import accumulate
from typing import NamedTuple, Protocol

from asyncllm.config import EngineLimits
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step_time import StepTimeModel
from asyncllm.engine.scheduling.waiting import WaitingQueue

#: A step has so many prompt tokens or none, and as many as take so many seconds: attending to a
#: chunk, however small, takes 20 us a layer on an H200.
CHUNK, CHUNK_SECONDS = 512, 10e-3
#: So many steps pass until it is asked again whether prompts are to begin.
PAUSE = 4
#: Requests that come within so many steps of each other are a batch.
GAP = 16
#: So many rows take as long as one.
FEW_ROWS = 16
#: The share of all pages that a batch may take: some are kept free for those that run.
PAGES_SHARE = 0.9


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


class GreedyPace:
    """As many as fit."""

    def prompt_tokens(
        self, step: int, num_decodes: int, waiting: WaitingQueue, batch: RunningBatch
    ) -> float:
        """See ``Pace.prompt_tokens``."""
        return math.inf


class EvenPace:
    """In as few rows as end a batch as soon as it can end.

    A batch takes as many steps as its longest output has tokens. Prompts at once would make all of
    them rows first, and leave few to most steps; yet another row costs the more, the more there
    are. So prompts wait while the rows that there are will do: if the longest of them begins
    whenever a row ends, nothing ends too late (list scheduling, longest first; Graham, SIAM Journal
    on Applied Mathematics 17, 1969). If not, prompts are taken, and none too late for its output to
    end with the longest one (earliest deadline first; the demand bound of Baruah, Rosier and
    Howell, Real-Time Systems 2, 1990).

    Nobody waits for what is not known or not part of the batch: prompts are taken at once if an
    output may end before its last token, if there are not slots and pages for all at a time, or if
    one has come later than the rest.

    Qwen3 on an H200, 256 prompts and outputs of 100 to 1,024 tokens, output tokens per second; with
    as many tokens in every step, prompt and output, as a first form of this had it; and so:

    |      | prompts at once | equal tokens    | few rows            |
    |------|-----------------|-----------------|---------------------|
    | 8B   | 10,472          | 10,748 - 10,761 | **11,010 - 11,031** |
    | 0.6B | 28,909          | 29,486 - 29,504 | **29,583 - 29,827** |

    Predicted were 2.3 % for 8B: products of 208 rows take a fifth longer than those of 192.
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
            self._joined = step  # all who wait for a slot are of the batch, and may be thousands
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
        # What is due until it is asked again must fit in a step.
        is_early = demand * PAUSE <= self._limits.max_num_batched_tokens
        if num_decodes > FEW_ROWS and is_early and _will_do(rows, prompts, steps):
            self._next = step + PAUSE
            return 0
        per_token = self._times.cost.per_token
        chunk = max(CHUNK, CHUNK_SECONDS / per_token) if per_token else CHUNK
        return math.ceil(max(demand, chunk))

    def _has_later(self, step: int, num_decodes: int, waiting: WaitingQueue) -> bool:
        """Whether somebody waits who came after the batch."""
        newest = max((seq.id for seq in waiting), default=-1)
        if newest > self._newest and (not num_decodes or step - self._joined <= GAP):
            self._newest, self._joined = newest, step
        return newest > self._newest

    def _fit(self, works: list[_Work]) -> bool:
        """Whether there are pages for all of them at a time."""
        page_size = self._limits.page_size
        pages = sum(-(-work.length // page_size) for work in works)
        return pages <= PAGES_SHARE * self._limits.num_pages

    def _work(self, seq: Sequence, prompt: int) -> _Work:
        length = self._forecast.length(seq)
        return _Work(prompt, length - len(seq.tokens), length, seq.surely_full)


class _Work(NamedTuple):
    """Of a sequence: tokens of prompt and output that are left, its length in the end, and whether
    that is certain.
    """

    prompt: int
    output: int
    length: int
    certain: bool


def _will_do(rows: list[_Work], prompts: list[_Work], steps: int) -> bool:
    """Whether, with no more rows than there are, all outputs end in so many steps."""
    ends = [row.output for row in rows]
    heapq.heapify(ends)
    for output in sorted((work.output for work in prompts), reverse=True):
        end = ends[0] + PAUSE + output
        if end > steps:
            return False
        heapq.heapreplace(ends, end)
    return True


def _demand(prompts: list[_Work], steps: int) -> float:
    """Prompt tokens a step with which none comes too late for its output to end in so many."""
    due = sorted((steps - work.output, work.prompt) for work in prompts)
    sums = accumulate(tokens for _, tokens in due)
    return max(tokens / (slack + 1) for tokens, (slack, _) in zip(sums, due, strict=True))
