"""Forecast: expected lengths of outputs, and expected times of waiting and service."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Final

from asyncllm.engine.scheduling.sequence import FIRST_RATE, FOREVER, Sequence
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel

#: The first bin has the outputs of fewer tokens than this. Beyond, each factor of two has PARTS.
FIRST, PARTS = 16, 4
#: Up to 2**24 tokens.
NUM_BINS: Final = 1 + 20 * PARTS
#: The assumption before any output has ended: none ends before this many tokens, and half of them
#: end within each factor of two beyond. If it is too high, few requests are admitted until the
#: first outputs have ended. If it is too low, the cache fills with outputs that it cannot hold.
FIRST_GUESS: Final = 1024
#: The assumption counts as this many outputs.
PRIOR_WEIGHT: Final = 0.25
#: Outputs over which a bin's share is averaged.
MEMORY: Final = 64.0
#: The tables are made anew after so many observations, or an eighth of all so far if these are
#: fewer: it takes as long as planning a step of 64 rows.
REFRESH: Final = 64
#: A smaller share of outputs is not told from none.
LEAST: Final = 1e-9


def bin_of(num_tokens: int) -> int:
    """The bin of outputs that end with this many tokens."""
    if num_tokens < FIRST:
        return 0
    doublings = num_tokens.bit_length() - FIRST.bit_length()
    part = PARTS * num_tokens // (FIRST << doublings) - PARTS
    return min(1 + PARTS * doublings + part, NUM_BINS - 1)


def _first_of(index: int) -> int:
    """The shortest output of a bin."""
    doublings, part = divmod(index - 1, PARTS)
    return (FIRST << doublings) * (PARTS + part) // PARTS if index else 0


_FIRSTS: Final = tuple(_first_of(index) for index in range(NUM_BINS + 1))


class OutputLengths:
    """Of each bin, the share of the outputs reaching it that end in it.

    This is the estimator of Kaplan and Meier (1958), with exponential forgetting. An output under
    way counts in all bins that it has passed. So short outputs, which end first, do not make all
    outputs look short, and long ones are noticed before the first of them has ended.
    """

    def __init__(
        self, first_guess: float = FIRST_GUESS, prior_weight: float = PRIOR_WEIGHT
    ) -> None:
        """
        Args:
            first_guess, prior_weight: take the places of ``FIRST_GUESS`` and ``PRIOR_WEIGHT``. With
                infinity, the assumption is that none ends.
        """
        self._first_guess = first_guess
        self._prior_weight = prior_weight
        self._seen = [0.0] * NUM_BINS
        self._ended = [0.0] * NUM_BINS
        self._num_seen = self._refresh_at = 0
        # At the beginning of each bin:
        self._survival: list[float] = []  # the share of all outputs that get there
        self._means: list[float] = []  # the mean of all outputs, each cut off there

    def passed(self, index: int) -> None:
        """An output has become longer than those of a bin."""
        self._saw(index, 0.0)

    def ended(self, index: int) -> None:
        """An output has ended in a bin."""
        self._saw(index, 1.0)

    def expected(self, num_tokens: int, most: int) -> float:
        """The expected length of an output that has ``num_tokens`` and may get ``most``."""
        if num_tokens >= most:
            return float(most)
        if self._num_seen >= self._refresh_at:
            self._tabulate()
            self._refresh_at = self._num_seen + min(max(1, self._num_seen // 8), REFRESH)
        share, mean = self._at(num_tokens)
        return num_tokens + (self._at(most)[1] - mean) / share

    def _saw(self, index: int, ended: float) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self._seen[index] = keep * self._seen[index] + 1.0
        self._ended[index] = keep * self._ended[index] + ended
        self._num_seen += 1

    def _tabulate(self) -> None:
        survival, areas = [1.0], []
        for index in range(NUM_BINS):
            first, after = _FIRSTS[index], _FIRSTS[index + 1]
            prior = (after - first) / after if first >= self._first_guess else 0.0
            ended = self._ended[index] + self._prior_weight * prior
            share = ended / (self._seen[index] + self._prior_weight)
            survival.append(max(LEAST, survival[-1] * (1.0 - share)))
            areas.append((after - first) * (survival[-2] + survival[-1]) / 2.0)
        self._survival = survival
        self._means = [0.0, *accumulate(areas)]

    def _at(self, num_tokens: int) -> tuple[float, float]:
        """``_survival`` and ``_means`` at any length: outputs end evenly within a bin."""
        index = bin_of(num_tokens)
        first, after = _FIRSTS[index], _FIRSTS[index + 1]
        begins, ends = self._survival[index], self._survival[index + 1]
        tokens = min(num_tokens, after) - first
        share = begins + (ends - begins) * tokens / (after - first)
        return share, self._means[index] + tokens * (begins + share) / 2.0


#: Mean tokens of an output before any has ended, where only a wait depends on it.
FIRST_MEAN = 256.0
#: The weight of the newest output in the mean, and of the newest decode step.
NEWEST = 1 / 32
#: Requests with a deadline are begun while they have this much more time for their output than
#: expected: outputs differ, and one that is dropped in the middle has cost as much as one in time.
MARGIN = 1.6
#: Of the requests that only their length can end, so many are assumed to have reached it. With
#: fewer, a single client that leaves lets others enter which then preempt each other.
LOYAL = 8.0


class Forecast:
    """Expectations from means of past outputs and steps, and from the step-time model."""

    def __init__(self, times: StepTimeModel):
        self._times = times
        self.lengths = OutputLengths()
        #: Of those that only their length can end: how soon their clients leave.
        self._left = OutputLengths(first_guess=math.inf, prior_weight=LOYAL)
        self._output = FIRST_MEAN
        #: Tokens of outputs by the kind of their deadline, of kinds that were seen.
        self._timely: dict[int, float] = {}
        #: Of a step without prompt chunks, for one token of each row; 0.0 until there was one.
        self.decode_seconds = 0.0
        #: Of any step with decode rows, for one token of each row; 0.0 until there was one.
        self.row_seconds = 0.0
        #: Of a step with prompt chunks; 0.0 until there was one.
        self._chunk_seconds = self._chunk_tokens = 0.0

    def saw_output(self, seq: Sequence, num_tokens: int) -> None:
        """A sequence ended, for any reason, after ``num_tokens`` of output."""
        self.grew(seq)
        if not seq.output.surely_full:
            self.lengths.ended(seq.output.bin)
        elif seq.num_prompt + num_tokens < seq.output.max_length:
            self._left.ended(seq.output.bin)
        self._output += (num_tokens - self._output) * NEWEST
        if seq.service.deadline < FOREVER:
            kind = _kind(seq)
            self._timely[kind] = _mean(self._timely.get(kind, 0.0), num_tokens)

    def saw_step(self, seconds: float, num_rows: int, prompt_tokens: int) -> None:
        """A step with so many decode rows and prompt tokens took ``seconds``."""
        if num_rows:
            self.row_seconds = _mean(self.row_seconds, seconds)
        if prompt_tokens:
            self._chunk_seconds = _mean(self._chunk_seconds, seconds)
            self._chunk_tokens = _mean(self._chunk_tokens, prompt_tokens)
        else:
            self.decode_seconds = _mean(self.decode_seconds, seconds)

    def prefill_seconds(self, num_tokens: int, start: int = 0) -> float:
        """Seconds that the device needs for prompt tokens from position ``start``."""
        if not self._times.fitted:
            return num_tokens / FIRST_RATE
        return self._times.prefill_seconds(num_tokens, start)

    def expected(self, seq: Sequence) -> float:
        """Expected seconds from the first step of ``seq`` to its last token, under today's load."""
        return self.turn_seconds(seq) + self.output_seconds(seq)

    def turn_seconds(self, seq: Sequence) -> float:
        """Seconds of steps that the rest of a prompt fills, decode rows beside it included."""
        rate = self._chunk_seconds / self._chunk_tokens if self._chunk_tokens else 0.0
        return max(seq.service.prefill_seconds, seq.service.num_left * rate)

    def output_seconds(self, seq: Sequence) -> float:
        """Seconds that the rest of an output may take, under today's load.

        An output is expected to be like others with such a deadline: they often are of one kind.
        """
        mean = self._timely.get(_kind(seq), 0.0)
        length = seq.output.max_length if seq.output.surely_full else seq.num_prompt + mean
        return MARGIN * max(1.0, length - len(seq.tokens)) * self.row_seconds

    def least(self, seq: Sequence) -> float:
        """Seconds from the first step of ``seq`` to its last token, at best."""
        shortest = (
            seq.output.max_length
            if seq.output.surely_full
            else max(seq.output.min_length, seq.num_prompt + 1)
        )
        num_output = max(1, shortest - len(seq.tokens))
        return self._times.prefill_seconds(seq.service.num_left) + num_output * self.decode_seconds

    def length(self, seq: Sequence) -> int:
        """The expected final length of ``seq``, at least one token more than it has.

        It depends on how many tokens of output there are, and how many there may be.
        """
        num_output, most = seq.num_output, seq.output.max_length - seq.num_prompt
        expected = seq.num_prompt + round(self._lengths_of(seq).expected(num_output, most))
        return min(max(expected, len(seq.tokens) + 1), seq.output.max_length)

    def grew(self, seq: Sequence) -> bool:
        """``seq`` has more tokens than before; returns whether that tells more of its length."""
        before, reached = seq.output.bin, bin_of(seq.num_output)
        while seq.output.bin < reached:
            self._lengths_of(seq).passed(seq.output.bin)
            seq.output.bin += 1
        return reached > before

    def _lengths_of(self, seq: Sequence) -> OutputLengths:
        return self._left if seq.output.surely_full else self.lengths

    def wait(self, num_ahead: int, tokens_ahead: int, num_free: int, num_rows: int) -> float:
        """Estimated seconds until a request that arrives now has its first step.

        Args:
            num_ahead, tokens_ahead: requests served before it, and their tokens to prefill.
            num_free: how many can begin without waiting for others to end.
            num_rows: how many run at once.
        """
        prompts = num_ahead * self._times.prefill_seconds(tokens_ahead // max(num_ahead, 1))
        turns = max(0, num_ahead + 1 - num_free) / max(num_rows, 1)
        return prompts + turns * self._output * self.decode_seconds


def _kind(seq: Sequence) -> int:
    """Deadlines within a factor of two are of one kind."""
    return int(1000 * (seq.service.deadline - seq.service.arrival)).bit_length()


def _mean(before: float, newest: float) -> float:
    return before + (newest - before) * NEWEST if before else newest
